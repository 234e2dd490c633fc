"""``local_map`` and ``from_local``

Functions of local tensors, with shards of other lengths on every rank.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol
from comparison.row import laid_out, own, row
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import local_map


def _mapped(function, out, inputs, mesh, **others):
    return local_map(function, out, inputs, device_mesh=mesh, **others)


@row()
def local_map_even(mesh, rank):
    """``local_map`` of even shards."""
    g = _mapped(lambda a: a.sin() * 2, [Shard(0)], ([Shard(0)],), mesh)
    return lambda x: g(x).sum(0), (laid_out(mesh, [Shard(0)], 4, 4),)


@row()
def local_map_uneven(mesh, rank):
    """``local_map`` of five rows on two ranks."""
    g = _mapped(lambda a: a.sin() * 2, [Shard(0)], ([Shard(0)],), mesh)
    return lambda x: g(x) * 2, (laid_out(mesh, [Shard(0)], 5, 4),)


@row(truth="none")
def local_map_uneven_gathered(mesh, rank):
    """Five rows on two ranks, gathered behind the ``local_map``: ranks launch other sizes."""
    g = _mapped(lambda a: a.sin() * 2, [Shard(0)], ([Shard(0)],), mesh)
    return lambda x: g(x * 3).full_tensor().cos(), (laid_out(mesh, [Shard(0)], 5, 4),)


@row()
def local_map_to_a_sum(mesh, rank):
    """Each rank's part of a product, pending as a sum."""
    g = _mapped(lambda a, b: a @ b, [Partial()], ([Shard(1)], [Shard(0)]), mesh)
    x, w = laid_out(mesh, [Shard(1)], 4, 6), laid_out(mesh, [Shard(0)], 6, 4, seed=1)
    return lambda x, w: g(x, w).redistribute(placements=[Replicate()]).sin(), (x, w)


@row()
def local_map_with_a_collective(mesh, rank):
    """A functional all-reduce inside the mapped function."""

    def body(a):
        return a - funcol.all_reduce(a.sum(0), "sum", mesh.get_group())

    g = _mapped(body, [Shard(0)], ([Shard(0)],), mesh)
    return lambda x: g(x).sin(), (laid_out(mesh, [Shard(0)], 5, 4, grad=False),)


@row()
def local_map_that_redistributes(mesh, rank):
    """Inputs that are laid out otherwise, moved on the way in."""
    g = _mapped(lambda a: a.softmax(1), [Shard(0)], ([Shard(0)],), mesh, redistribute_inputs=True)
    return lambda x: g(x).sin(), (laid_out(mesh, [Shard(1)], 5, 4),)


@row()
def local_map_in_a_region(mesh, rank):
    """``local_map`` inside ``nested_compile_region``, called twice."""
    g = _mapped(lambda a: a.sin() * 2, [Shard(0)], ([Shard(0)],), mesh)
    region = torch.compiler.nested_compile_region(lambda x: g(x) + 1)
    return lambda x: region(region(x)).sum(0), (laid_out(mesh, [Shard(0)], 4, 4),)


@row()
def local_map_in_a_region_uneven(mesh, rank):
    """The same with uneven shards."""
    g = _mapped(lambda a: a.sin() * 2, [Shard(0)], ([Shard(0)],), mesh)
    region = torch.compiler.nested_compile_region(lambda x: g(x) + 1)
    return lambda x: region(region(x)) * 2, (laid_out(mesh, [Shard(0)], 5, 4),)


@row()
def region_on_dtensors(mesh, rank):
    """``nested_compile_region`` of a product of DTensors."""
    region = torch.compiler.nested_compile_region(lambda x, w: (x @ w).relu())
    x, w = laid_out(mesh, [Replicate()], 4, 4), laid_out(mesh, [Shard(1)], 4, 4, seed=1)
    return lambda x, w: region(x, w).redistribute(placements=[Replicate()]) * 2, (x, w)


@row()
def region_on_a_pending_product(mesh, rank):
    """``nested_compile_region`` of a product that is pending as a sum."""
    region = torch.compiler.nested_compile_region(lambda x, w: (x @ w).relu())
    x, w = laid_out(mesh, [Shard(1)], 4, 4), laid_out(mesh, [Shard(0)], 4, 4, seed=1)
    return lambda x, w: region(x, w) * 2, (x, w)


@row()
def local_map_gives_a_tuple(mesh, rank):
    """Two results, of which one is no tensor of ranks."""
    g = _mapped(lambda a: (a.sin(), a.sum(0)), ([Shard(0)], [Partial()]), ([Shard(0)],), mesh)
    return lambda x: g(x), (laid_out(mesh, [Shard(0)], 5, 4),)


@row()
def local_map_with_gradients_laid_out(mesh, rank):
    """``in_grad_placements`` of a replica that each rank uses for its rows."""
    g = _mapped(
        lambda a, w: a @ w,
        [Shard(0)],
        ([Shard(0)], [Replicate()]),
        mesh,
        in_grad_placements=([Shard(0)], [Partial()]),
    )
    x, w = laid_out(mesh, [Shard(0)], 5, 4), laid_out(mesh, [Replicate()], 4, 4, seed=1)
    return lambda x, w: g(x, w).sin(), (x, w)


@row()
def from_local_even(mesh, rank):
    """``from_local`` of equal shards."""

    def f(a):
        return DTensor.from_local(a, mesh, [Shard(0)]).sum(0).full_tensor()

    return f, (own(rank, 3, 4).requires_grad_(),)


@row()
def from_local_with_its_shape(mesh, rank):
    """``from_local`` of uneven shards, whose shape is given."""

    def f(a):
        x = DTensor.from_local(a, mesh, [Shard(0)], shape=torch.Size([5, 4]), stride=(4, 1))
        return x.sin().full_tensor()

    return f, (own(rank, 3 - rank, 4).requires_grad_(),)


@row()
def from_local_not_as_chunk(mesh, rank):
    """``from_local`` of shards that are not cut like ``chunk``, without a shape."""

    def f(a):
        return (DTensor.from_local(a, mesh, [Shard(0)]) * 2).to_local()

    return f, (own(rank, 1 + 2 * rank, 4).requires_grad_(),)


@row()
def from_local_checked(mesh, rank):
    """``from_local(run_check=True)`` inside."""

    def f(a):
        return DTensor.from_local(a, mesh, [Replicate()], run_check=True) * 2

    return f, (own(rank, 3, 4),)


@row()
def from_local_of_a_sum(mesh, rank):
    """``from_local`` of summands, reduced."""

    def f(a):
        x = DTensor.from_local(a, mesh, [Partial()])
        return x.redistribute(placements=[Shard(0)]).sin()

    return f, (own(rank, 5, 4).requires_grad_(),)


@row(dynamic=True)
def from_local_unlike_batches(mesh, rank):
    """Batches of other lengths on each rank, averaged."""

    def f(a, w):
        y = (a @ w.to_local()).square()
        return DTensor.from_local(y.sum(), mesh, [Partial()]).full_tensor()

    w = laid_out(mesh, [Replicate()], 4, 4)
    return f, [(own(rank, 3 + 2 * rank + i, 4, seed=i), w) for i in range(3)]


@row()
def local_map_in_a_region_on_a_product(mesh, rank):
    """A product and a ``local_map`` in one region, called twice on other values."""
    g = _mapped(lambda a: a.softmax(1), [Shard(0)], ([Shard(0)],), mesh)
    region = torch.compiler.nested_compile_region(lambda x, w: g(x @ w))
    x, w = laid_out(mesh, [Shard(0)], 4, 4), laid_out(mesh, [Replicate()], 4, 4, seed=1)
    return lambda x, w: region(region(x, w), w).sin(), (x, w)
