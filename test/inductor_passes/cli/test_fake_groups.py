"""Groups that stand in for a job's: they carry its backends, move nothing, and what ranks settle is settled as if all were alike."""

import datetime

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from inductor_passes.torch_compat import c10d, fake_groups


@pytest.fixture(params=["gloo", "cpu:gloo,cuda:nccl"])
def backend(request):
    with fake_groups.standing_in(4, 2):
        dist.init_process_group(request.param)
        yield request.param
        dist.destroy_process_group()


def test_groups_say_what_the_jobs_say(backend):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (2, 4, backend)
    row = mesh.get_group("tp")
    assert dist.get_process_group_ranks(row) == [2, 3]
    assert dist.get_backend(row) == backend and c10d.moves_data(row)
    assert list(mesh.get_coordinate()) == [1, 0]


def test_they_move_nothing(backend):
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [1, 1]


def test_objects_are_those_of_alike_ranks(backend):
    found, held = [None] * 4, ["mine"]
    dist.all_gather_object(found, {"rows": 8})
    dist.broadcast_object_list(held, src=0)
    assert found == [{"rows": 8}] * 4 and held == ["mine"]
    dist.gather_object(3, found, dst=2)
    dist.gather_object(3, None, dst=0)
    assert found == [3] * 4


def test_outside_there_are_none():
    assert fake_groups.store() is None and c10d.job_store() is None


def test_peers_have_written_what_this_rank_has():
    with fake_groups.standing_in(4, 2):
        store = fake_groups.store()
        store.set("vote/key/2", "yes")
        assert store.get("vote/key/0") == store.get("vote/key/3") == b"yes"
        assert store.check(["vote/key/1"]) and not store.check(["vote/other/1"])
        assert store.compare_set("first", "", "2") == b"2"
        assert store.compare_set("first", "", "3") == b"2"
        assert [store.add("count", 2), store.add("count", 1)] == [2, 3]
        with pytest.raises(RuntimeError, match="nobody writes"):
            store.wait(["never"], datetime.timedelta(seconds=30))
