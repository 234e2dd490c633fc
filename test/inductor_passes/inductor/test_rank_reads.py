"""Who asks for the rank while a graph is traced is noticed; where it makes no difference, it is
not.
"""

import contextlib
import os
import pickle
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.placement_types import _StridedShard

from inductor_passes.torch_compat import rank_reads


@pytest.fixture
def mesh(fake_world):
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


@pytest.fixture
def fake_world():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


ASKING = {
    "dist.get_rank": lambda mesh: dist.get_rank(),
    "of a group": lambda mesh: mesh.get_group().rank(),
    "get_rank": lambda mesh: mesh.get_rank(),
    "get_local_rank": lambda mesh: mesh.get_local_rank(),
    "ranks of a group": lambda mesh: dist.get_process_group_ranks(mesh.get_group()),
    "a place looked at": lambda mesh: mesh.get_coordinate()[0],
    "a place unpacked": lambda mesh: [*mesh.get_coordinate()],
    "a place compared": lambda mesh: mesh.get_coordinate() == (0,),
    "a place in a table": lambda mesh: {mesh.get_coordinate(): 1},
    "a chunk": lambda mesh: distribute_tensor(torch.ones(8), mesh, [Shard(0)], src_data_rank=None),
    "uneven shards": lambda mesh: (
        DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
        .new_zeros(6, 4)
        .redistribute(placements=[Shard(0)])
    ),
}


@pytest.mark.parametrize("asked", ASKING)
def test_asking_is_noticed(mesh, asked):
    with rank_reads.noticed() as reads:
        assert not reads.first
        ASKING[asked](mesh)
    assert reads.first


def view_and_reduce(mesh):
    x = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)], run_check=False)
    y = DTensor.from_local(torch.ones(8, 4), mesh, [Partial()], run_check=False)
    return (x.view(8, 2, 2).expand(8, 2, 2) + 1, y.redistribute(placements=[Replicate()]))


NOT_ASKING = {
    "whether it takes part": lambda mesh: mesh.get_coordinate() is None,
    "even shards": view_and_reduce,
    "another variable": lambda mesh: os.environ.get("HOME"),
}


@pytest.mark.parametrize("done", NOT_ASKING)
def test_what_is_the_same_on_all_ranks_is_not(mesh, done):
    NOT_ASKING[done](mesh)
    with rank_reads.noticed() as reads:
        NOT_ASKING[done](mesh)
    assert reads.first == ""


def test_what_dtensor_has_found_before_is_noticed_too(mesh):
    """It remembers the local shape, which it has by its rank."""
    assert rank_reads.can_notice()
    x = DTensor.from_local(
        torch.ones(2, 4), mesh, [Shard(0)], run_check=False, shape=(6, 4), stride=(4, 1)
    )
    x.view(6, 2, 2)
    with rank_reads.noticed() as reads:
        x.view(6, 2, 2)
    assert "_sym_get_coordinate" in reads.first or "get_coordinate" in reads.first


def test_what_only_tells_entries_of_a_cache_apart_is_not(mesh):
    with rank_reads.noticed() as reads, rank_reads.as_a_key():
        mesh.get_rank()
    assert reads.first == ""
    with rank_reads.as_a_key():
        mesh.get_rank()


PLACES = [
    *((DeviceMesh, each) for each in ("get_rank", "get_coordinate", "get_local_rank")),
    *((dist, "get_rank"), (dist.distributed_c10d, "get_rank"), (dist.ProcessGroup, "rank")),
    (type(os.environ), "__getitem__"),
]


def test_torch_is_left_as_it_was(mesh):
    before = [vars(owner).get(name) for owner, name in PLACES]
    with pytest.raises(ZeroDivisionError), rank_reads.noticed():
        assert [vars(owner).get(name) for owner, name in PLACES] != before
        _ = 1 / 0
    assert [vars(owner).get(name) for owner, name in PLACES] == before
    assert mesh.get_group().rank() == dist.get_rank() == 1


def test_torch_agrees_where_blocks_end_in_order_of_beginning(mesh):
    """Two threads that compile at once."""
    before = [vars(owner).get(name) for owner, name in PLACES]
    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    one = first.enter_context(rank_reads.noticed())
    two = second.enter_context(rank_reads.noticed())
    first.close()
    mesh.get_rank()
    assert two.first and not one.first
    second.close()
    assert [vars(owner).get(name) for owner, name in PLACES] == before
    assert type(mesh.get_coordinate()) is tuple


@pytest.mark.parametrize(
    ("shape", "placements", "even"),
    [
        ((8, 3), [Shard(0), Replicate()], True),
        ((8, 3), [Shard(0), Shard(0)], True),
        ((4, 3), [Shard(0), Shard(-2)], False),
        ((8, 3), [Shard(0), Shard(1)], False),
        ((8, 4), [Shard(-1), Partial()], True),
        ((8, 4), [_StridedShard(0, split_factor=2), Shard(0)], False),
    ],
)
def test_shards_of_one_shape(shape, placements, even):
    assert rank_reads._is_even(shape, (4, 2), placements) is even


def test_a_layout_of_the_users_is_not_known():
    propagator = DTensor._op_dispatcher.sharding_propagator
    op = torch.ops.aten.sin.default
    before = propagator.op_strategy_funcs.get(op)
    assert rank_reads.strategies_are_known()
    try:

        @register_sharding(op)
        def layouts(x):
            return [([Replicate()], [Replicate()])]

        assert not rank_reads.strategies_are_known()
        propagator.op_strategy_funcs[op] = layouts
        assert not rank_reads.strategies_are_known()
    finally:
        if before is None:
            propagator.op_strategy_funcs.pop(op)
        else:
            propagator.op_strategy_funcs[op] = before
        propagator.op_to_schema_info.pop(op, None)


def test_the_ranks_of_a_part_of_a_mesh_are_noticed(fake_world):
    part = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    with rank_reads.noticed() as reads:
        assert part.mesh.tolist() == [0, 1]
    assert reads.first


def test_other_threads_are_not(mesh):
    found = []
    with rank_reads.noticed() as reads:
        other = threading.Thread(
            target=lambda: found.append((mesh.get_rank(), mesh.get_coordinate()))
        )
        other.start()
        other.join()
    assert not reads.first and type(found[0][1]) is tuple


def test_a_place_is_pickled_as_a_plain_tuple(mesh):
    with rank_reads.noticed():
        place = mesh.get_coordinate()
    found = pickle.loads(pickle.dumps(place))
    assert type(found) is tuple and found == (1,)
