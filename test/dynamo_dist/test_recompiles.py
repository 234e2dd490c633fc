"""When a compiled function is compiled again: where a value that it used has changed, and only
there.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor


@pytest.fixture(autouse=True)
def on(mesh, enabled):
    """Everything here runs enabled, on a mesh of 2 x 4 fake ranks."""


def sharded(placement=None, mesh=None):
    mesh = mesh or DeviceMesh("cpu", torch.arange(8))
    return distribute_tensor(torch.ones(16, 8), mesh, [placement or Shard(0)], src_data_rank=None)


def in_flight():
    """A tensor that still waits for its collective."""
    return funcol.all_reduce(torch.ones(4), "sum", dist.group.WORLD)


def compiles(compiled, function, calls):
    """How often ``function`` is compiled for these arguments; each call gives eager's value."""
    run, graphs = compiled(function)
    for arguments in calls:
        found, expected = run(*arguments), function(*arguments)
        if isinstance(found, DTensor):
            assert found.placements == expected.placements
            found, expected = found.to_local(), expected.to_local()
        torch.testing.assert_close(found + 0, expected + 0)
    return len(graphs)


def test_asynchronous_and_plain_tensors_take_turns(compiled):
    """At most one graph for each kind, however often they alternate."""
    calls = [(tensor,) for _ in range(3) for tensor in (in_flight(), torch.ones(4))]
    assert compiles(compiled, lambda x: x * 2, calls) <= 2


def test_dtensors_whose_local_tensor_is_in_flight_or_not(compiled):
    waiting = [sharded().redistribute(placements=[Replicate()]) for _ in range(3)]
    plain = [sharded(Replicate()) for _ in range(3)]
    calls = [(d,) for pair in zip(waiting, plain, strict=True) for d in pair]
    assert compiles(compiled, lambda d: d * 2, calls) <= 2


def test_equal_meshes_and_placements_are_one(compiled):
    """Each DTensor has a mesh and placements of its own, equal to the others'."""
    assert compiles(compiled, lambda d: d * 2, [(sharded(),) for _ in range(4)]) == 1


def test_other_placements_of_a_dtensor_recompile_once_each(compiled):
    calls = [(sharded(p),) for p in (Shard(0), Shard(1), Shard(0), Shard(1))]
    assert compiles(compiled, lambda d: d * 2, calls) == 2


@pytest.mark.parametrize(
    ("function", "expected"), [(lambda x, p: x + 1, 1), (lambda x, p: x + p.dim, 2)]
)
def test_placements_are_guarded_where_they_are_used(compiled, function, expected):
    calls = [(torch.ones(2), p) for p in (Shard(0), Shard(1), Shard(0))]
    assert compiles(compiled, function, calls) == expected


def test_meshes_that_are_not_used_are_not_guarded(compiled, mesh):
    others = [mesh, mesh["tp"], DeviceMesh("cpu", torch.arange(8))]
    assert compiles(compiled, lambda x, m: x + 1, [(torch.ones(2), m) for m in others]) == 1


def test_meshes_are_guarded_where_they_are_used(compiled, mesh):
    others = [mesh, mesh["tp"], mesh]
    calls = [(torch.ones(2), m) for m in others]
    assert compiles(compiled, lambda x, m: x + m.ndim, calls) == 2


def test_a_launch_uses_the_members(compiled, mesh):
    """Groups of equal size and rank: the graph names the group, so each has its own."""
    groups = [mesh["tp"].get_group(), dist.new_group([0, 1, 4, 5]), mesh["tp"].get_group()]

    def program(x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    assert compiles(compiled, program, [(torch.ones(2), g) for g in groups]) == 2


def test_reduce_ops_are_guarded_by_value(compiled):
    ops = [dist.ReduceOp.SUM, dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.SUM]

    def program(x, op):
        x = x.clone()
        dist.all_reduce(x, op)
        return x

    assert compiles(compiled, program, [(torch.ones(2), op) for op in ops]) == 2


def test_an_equal_partial_is_the_same(compiled, mesh):
    def program(x, p):
        return DTensor.from_local(x, mesh["tp"], [p], run_check=False) * 2

    calls = [(torch.ones(2), p) for p in (Partial(), Partial("sum"), Partial("avg"), Partial())]
    assert compiles(compiled, program, calls) == 2
