"""Changes in torch that matter in one place: each is missed here, and by no other fast test,
where it is left out.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

from dynamo_dist.tracing import eager_fallback, unsharded_parameters


@pytest.fixture(autouse=True)
def on(mesh, enabled):
    """Everything here runs enabled, on a mesh of 2 x 4 fake ranks."""


def test_an_empty_shard_is_cut_off_the_tensor_as_others_are():
    def last(x):
        return Shard(0)._split_tensor(x, 4, with_padding=False)[0][3]

    calls = {node.target for node in make_fx(last)(torch.ones(2, 3)).graph.nodes}
    assert torch.ops.aten.new_zeros.default not in calls
    assert torch.ops.aten.slice.Tensor in calls


def test_the_size_of_a_strided_shard_is_a_number_while_tracing():
    shard = _StridedShard(0, split_factor=2)
    wanted = shard.local_shard_size_and_offset(8, 4, 1)
    with FakeTensorMode():
        assert shard.local_shard_size_and_offset(8, 4, 1) == wanted


def test_partial_embedding_has_a_mask_of_its_own_in_a_trace(mesh):
    weight = distribute_tensor(torch.randn(16, 4), mesh["tp"], [Shard(0)])
    where = distribute_tensor(torch.arange(6), mesh["tp"], [Replicate()])
    for _ in range(2):
        torch.compiler.reset()
        looked_up = torch.compile(F.embedding, backend="aot_eager", fullgraph=True)
        assert looked_up(where, weight).placements[0].is_partial()


class Job:
    """A job of which ranks have settled on an order that Python would not take."""

    def is_unlike_python(self, frame):
        return True

    def is_left_to_python(self, code):
        return False


@pytest.mark.parametrize(("job", "compiles"), [(Job(), 3), (None, 1)])
def test_a_limit_of_compiles_does_not_part_ranks(monkeypatch, compiled, job, compiles):
    monkeypatch.setattr(eager_fallback.decision, "current", lambda: job)
    with torch._dynamo.config.patch(recompile_limit=1, automatic_dynamic_shapes=False):
        scaled, graphs = compiled(lambda x, factor: x * factor, fullgraph=False)
        for factor in (1.5, 2.5, 3.5):
            assert torch.equal(scaled(torch.ones(2), factor), torch.full((2,), factor))
    assert len(graphs) == compiles


def test_same_mesh_object_is_not_compared_on_every_call(mesh, monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    step, x = torch.compile(model, backend="aot_eager"), torch.ones(2, 8)
    for _ in range(2):
        step(x)
    compared, equal = [], DeviceMesh.__eq__
    monkeypatch.setattr(
        DeviceMesh, "__eq__", lambda one, other: compared.append(1) or equal(one, other)
    )
    step(x)
    assert not compared


def averaged(mesh):
    """A DDP module, and what stands for it where ranks settle whether its forward runs whole."""
    wrapped = DistributedDataParallel(torch.nn.Linear(4, 4))
    return wrapped, wrapped


def fully_sharded(mesh):
    """An FSDP2 module likewise."""
    wrapped = fully_shard(torch.nn.Linear(4, 4), mesh=mesh["tp"])
    return wrapped, wrapped._get_fsdp_state()


@pytest.mark.parametrize("make", [averaged, fully_sharded])
def test_forward_in_eager_fallback_is_so_on_all_ranks(mesh, monkeypatch, make):
    asked = []
    monkeypatch.setattr(
        unsharded_parameters.eager_fallback, "runs_in_graph", lambda *of: asked.append(of)
    )
    model, wrapper = make(mesh)
    model(torch.ones(2, 4))
    assert not unsharded_parameters.is_broken(wrapper)
    # A trace has gone in, and Dynamo runs the function in Python.
    unsharded_parameters._begun.add(wrapper)
    model(torch.ones(2, 4))
    assert unsharded_parameters.is_broken(wrapper)
    assert asked == [(wrapper, False)]


def test_as_strided_speaks_of_the_whole_tensor(mesh):
    whole = torch.arange(12.0).reshape(4, 3)
    found = distribute_tensor(whole, mesh["tp"], [Replicate()]).as_strided((3, 4), (1, 3))
    assert torch.equal(found.to_local(), whole.t())


def test_region_that_reads_an_outer_mesh_and_group_is_one_graph(mesh, compiled):
    group = mesh.get_group("tp")

    @torch.compiler.nested_compile_region
    def block(x):
        return x * mesh.size(0) + dist.get_world_size(group) + mesh.get_local_rank("tp")

    run, graphs = compiled(lambda x: block(block(block(x))))
    assert torch.equal(run(torch.ones(2)), torch.full((2,), 36.0))
    assert len(graphs) == 1
