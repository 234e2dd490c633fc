"""Values of Python: what programs print, copy, compare and ask

Each must be eager mode's answer, or a break that says why.
"""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
import torch.distributed as dist
from comparison.row import laid_out, own, row
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard


def _x(mesh, grad=False):
    return laid_out(mesh, [Shard(0)], 4, 4, grad=grad)


@row()
def deep_copied(mesh, rank):
    """``copy.deepcopy`` of a DTensor."""
    return lambda x: copy.deepcopy(x) * 2, (_x(mesh),)


@row()
def shallow_copied(mesh, rank):
    """``copy.copy`` of a DTensor."""
    return lambda x: copy.copy(x) * 2, (_x(mesh),)


@row()
def printed(mesh, rank):
    """``print(x)``."""

    def f(x):
        print(x)
        return x * 2

    return f, (_x(mesh),)


@row()
def layout_printed(mesh, rank):
    """``print(x.placements, x.shape)``."""

    def f(x):
        print(x.placements, x.shape, x.device_mesh)
        return x * 2

    return f, (_x(mesh),)


@row()
def repr_of_a_value(mesh, rank):
    """``repr(x)``, and its length in the result."""
    return lambda x: (x * 2, repr(x)), (_x(mesh),)


@row()
def repr_of_the_layout(mesh, rank):
    """An f-string of placements, mesh and shape."""
    return lambda x: (x * 2, f"{x.placements} {x.device_mesh} {tuple(x.shape)}"), (_x(mesh),)


@row()
def listed_floats(mesh, rank):
    """``tolist()`` of floats of a replica."""

    def f(x):
        a, b = x.sum(0)[:2].full_tensor().tolist()
        return x * 2 + a, b

    return f, (_x(mesh),)


@row()
def listed_dtensor(mesh, rank):
    """``tolist()`` of a DTensor itself."""
    return lambda x: (x * 2, x[:, 0].tolist()), (_x(mesh),)


@row(truth="plugin")
def float_of_a_sum(mesh, rank):
    """``float(x.sum())`` and ``x.sum().item()``."""
    return lambda x: x * float(x.sum()) + x.amax().item(), (_x(mesh),)


@row()
def close(mesh, rank):
    """``torch.allclose`` of two DTensors, one of them pending."""
    return lambda x: (x * 2, torch.allclose(x.sum(0), x.sum(0) + 1e-9)), (_x(mesh),)


@row()
def equal(mesh, rank):
    """``torch.equal`` of DTensors that differ on one rank alone."""

    def f(x, y):
        return x * 2, torch.equal(x, y), x.equal(x)

    x, y = _x(mesh), _x(mesh)
    if rank:
        y._local_tensor[0, 0] = 9.0
    return f, (x, y)


@row()
def equal_in_a_branch(mesh, rank):
    """A branch on ``torch.equal``."""

    def f(x, y):
        return x * 2 if torch.equal(x, y) else x - 1

    return f, (_x(mesh), _x(mesh))


@row()
def sorted_pairs(mesh, rank):
    """``sorted`` of pairs of a name and a tensor."""

    def f(x, y):
        pairs = sorted([("b", x), ("a", y)])
        return pairs[0][1] * 2 + pairs[1][1]

    return f, (_x(mesh), laid_out(mesh, [Shard(0)], 4, 4, seed=1, grad=False))


@row()
def sorted_by_size(mesh, rank):
    """``sorted(key=...)`` of DTensors by their size."""

    def f(x, y):
        small, large = sorted([x, y], key=lambda t: t.numel())
        return small.sum(0) + large.sum(0)

    return f, (_x(mesh), laid_out(mesh, [Shard(0)], 2, 4, seed=1, grad=False))


@row(trained=False)
def reduce_op_made(mesh, rank):
    """``dist.ReduceOp(...)`` made inside."""

    def f(a):
        dist.all_reduce(a, op=dist.ReduceOp(dist.ReduceOp.MAX))
        return a * 2

    return f, (own(rank, 4),)


@row(trained=False)
def mesh_made(mesh, rank):
    """``DeviceMesh(...)`` made inside, equal to one that is there."""

    def f(x):
        other = DeviceMesh("cpu", [0, 1])
        return x * other.size()

    return f, (_x(mesh),)


@row(trained=False)
def mesh_initialised(mesh, rank):
    """``init_device_mesh`` inside."""

    def f(x):
        other = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        return x * other.size() + other.get_local_rank()

    return f, (_x(mesh),)


@row(trained=False)
def mesh_from_a_group(mesh, rank):
    """``DeviceMesh.from_group`` inside."""
    group = mesh.get_group()

    def f(x):
        other = DeviceMesh.from_group(group, "cpu")
        return x * other.size()

    return f, (_x(mesh),)


@row(2, 2, trained=False)
def mesh_sliced_and_flattened(mesh, rank):
    """Slices, coordinates and ranks of a mesh."""

    def f(x):
        tp = mesh["tp"]
        return x * tp.size() + tp.get_local_rank(), mesh.get_coordinate(), mesh.mesh.tolist()

    return f, (laid_out(mesh, [Shard(0), Replicate()], 4, 4, grad=False),)


@row(trained=False)
def work_asked(mesh, rank):
    """``Work.is_completed()`` after the wait."""

    def f(a):
        work = dist.all_reduce(a, async_op=True)
        work.wait()
        return a * 2, work.is_completed()

    return f, (own(rank, 4),)


@row(trained=False)
def work_asked_before(mesh, rank):
    """``Work.is_completed()`` in a loop before the wait."""

    def f(a):
        work = dist.all_reduce(a, async_op=True)
        while not work.is_completed():
            pass
        work.wait()
        return a * 2

    return f, (own(rank, 4),)


@row()
def clock_asked(mesh, rank):
    """``time.perf_counter()`` around a product."""

    def f(x):
        start = time.perf_counter()
        y = x * 2
        return y, time.perf_counter() - start >= 0

    return f, (_x(mesh),)


@row()
def debug_level_asked(mesh, rank):
    """``dist.get_debug_level()`` in a branch."""

    def f(x):
        return x * 2 if dist.get_debug_level() == dist.DebugLevel.OFF else x

    return f, (_x(mesh),)


@row(2, 2)
def strided_factor_asked(mesh, rank):
    """``split_factor`` of a placement of FSDP2 beside tensor parallelism."""
    from torch.distributed.tensor.placement_types import _StridedShard

    x = laid_out(mesh, [Shard(0), Replicate()], 8, 4, grad=False)
    strided = _StridedShard(0, split_factor=2)

    def f(x):
        return x * strided.split_factor, strided.dim, strided.is_shard()

    return f, (x,)


@row()
def sizes_asked(mesh, rank):
    """``nbytes``, ``element_size``, ``stride``, ``is_contiguous``,
    ``untyped_storage().nbytes()``.
    """

    def f(x):
        told = (x.nbytes, x.element_size(), x.stride(), x.is_contiguous(), x.dtype, x.device.type)
        return x * 2, told, x.to_local().untyped_storage().nbytes()

    return f, (_x(mesh),)


@row()
def placements_compared(mesh, rank):
    """Placements compared, hashed, kept in a set, matched by type."""

    def f(x):
        same = x.placements == (Shard(0),) and Shard(0) in {Shard(0), Replicate()}
        return x * 2 if same and isinstance(x.placements[0], Shard) else x

    return f, (_x(mesh),)


@row()
def leaf_asked(mesh, rank):
    """``is_leaf``, ``requires_grad``, ``grad`` and ``grad_fn``."""

    def f(x):
        y = x * 2
        return y, x.is_leaf, y.requires_grad, x.grad is None, y.grad_fn is None

    return f, (_x(mesh, grad=True),)


@row()
def kept_in_a_dictionary(mesh, rank):
    """Results in a dictionary of lists that the caller gave."""

    def f(x, kept):
        kept["seen"].append(x * 2)
        return x.sum(0)

    return f, (_x(mesh), {"seen": []})


@row()
def as_numpy(mesh, rank):
    """``numpy()`` of a full tensor."""
    return lambda x: x * float(x.full_tensor().detach().numpy().max()), (_x(mesh),)


@row(trained=False)
def objects_gathered(mesh, rank):
    """``all_gather_object``."""

    def f(x):
        found: list[Any] = [None, None]
        dist.all_gather_object(found, x.to_local().shape[0] + rank)
        return x * sum(found)

    return f, (_x(mesh),)


@row()
def deep_copied_and_written(mesh, rank):
    """A copy that is written, beside what it was copied from."""

    def f(x):
        y = copy.deepcopy(x)
        y[0] = 0.5
        return x * 2, y

    return f, (_x(mesh),)
