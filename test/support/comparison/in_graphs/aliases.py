"""Memory that is shared, and written to

Views as inputs and outputs, and plain tensors that are written beside a DTensor.
"""

from __future__ import annotations

import torch
from comparison.row import drawn, laid_out, row
from torch.distributed.tensor import Shard


@row()
def plain_written_beside(mesh, rank):
    """A plain buffer is written beside a DTensor."""

    def f(x, b):
        b.add_(1)
        return x * 2, b.sum()

    return f, (laid_out(mesh, [Shard(0)], 4, 4), drawn(4))


@row()
def plain_view_written_beside(mesh, rank):
    """A plain tensor and a view of it come in, the base is written."""
    a = drawn(6)

    def f(x, a, b):
        a.mul_(2)
        return x * 2, b + 1

    return f, (laid_out(mesh, [Shard(0)], 4, 4), a, a[2:])


@row()
def plain_view_written_through(mesh, rank):
    """A plain tensor and a view of it come in, the view is written."""
    a = drawn(6)

    def f(x, a, b):
        b.mul_(2)
        return x * 2, a + 1

    return f, (laid_out(mesh, [Shard(0)], 4, 4), a, a[2:])


@row(trained=False)
def plain_overlapping_views(mesh, rank):
    """Two plain views that overlap, one is written."""
    a = drawn(6)

    def f(x, a, b):
        a.add_(1)
        b.mul_(3)
        return x + 1

    return f, (laid_out(mesh, [Shard(0)], 4, 4, grad=False), a[:4], a[2:])


def _with_its_local_tensor(mesh):
    x = laid_out(mesh, [Shard(0)], 4, 4, grad=False)
    return x, x._local_tensor


@row(trained=False)
def local_tensor_beside_its_dtensor(mesh, rank):
    """A DTensor and its local tensor come in, the local tensor is written."""

    def f(x, local):
        local.add_(1)
        return x * 2

    return f, _with_its_local_tensor(mesh)


@row(trained=False)
def local_tensor_written_through(mesh, rank):
    """A DTensor and its local tensor come in, the DTensor is written."""

    def f(x, local):
        x.add_(1)
        return local * 2

    return f, _with_its_local_tensor(mesh)


@row(trained=False)
def dtensor_view_written(mesh, rank):
    """A view of a DTensor comes in and is written."""
    x = laid_out(mesh, [Shard(0)], 4, 6, grad=False)
    return lambda v: v.mul_(2), (x.view(4, 2, 3),)


@row(trained=False, dynamic=True)
def dtensor_view_written_dynamic(mesh, rank):
    """The same with dynamic sizes."""
    x = laid_out(mesh, [Shard(0)], 4, 6, grad=False)
    return lambda v: v.mul_(2), (x.view(4, 2, 3),)


@row(trained=False, dynamic=True)
def dtensor_flat_view_dynamic(mesh, rank):
    """A flattened view of a DTensor comes in, as in low-bit optimizers; dynamic sizes."""
    x = laid_out(mesh, [Shard(0)], 8, 6, grad=False)

    def f(p, g):
        scale = p.view(-1, 6).abs().amax(-1, keepdim=True)
        p.lerp_(g / scale.view(-1)[0].detach(), 0.1)
        return scale

    return f, (x.view(-1), laid_out(mesh, [Shard(0)], 48, seed=1, grad=False))


@row(trained=False, dynamic=True)
def dtensor_row_view_dynamic(mesh, rank):
    """A slice of a DTensor along a whole dimension comes in and is written; dynamic sizes."""
    x = laid_out(mesh, [Shard(0)], 4, 6, grad=False)
    return lambda v: v.add_(1).sum(), (x[:, 2:5],)


@row(trained=False)
def dtensor_beside_its_view(mesh, rank):
    """A DTensor and a view of it come in, the base is written."""
    x = laid_out(mesh, [Shard(0)], 4, 6, grad=False)

    def f(x, v):
        x.mul_(2)
        return v + 1

    return f, (x, x.view(4, 2, 3))


@row(trained=False)
def dtensor_given_twice(mesh, rank):
    """One DTensor as two arguments, written through one."""
    x = laid_out(mesh, [Shard(0)], 4, 6, grad=False)

    def f(x, y):
        x.mul_(2)
        return y + 1

    return f, (x, x)


@row()
def output_and_its_view(mesh, rank):
    """An output and a view of it."""

    def f(x):
        y = x * 2
        return y, y.view(4, 2, 3)

    return f, (laid_out(mesh, [Shard(0)], 4, 6),)


@row()
def outputs_that_are_views(mesh, rank):
    """Two outputs that are views of a DTensor made inside."""

    def f(x):
        y = x * 2
        return y.view(4, 2, 3), y.t()

    return f, (laid_out(mesh, [Shard(0)], 4, 6),)


@row(trained=False)
def outputs_share_memory(mesh, rank):
    """Two outputs that are views of each other, one of which is written outside."""

    def f(x):
        y = x * 2
        return y.view(4, 2, 3), y.t()

    def step(call, x):
        one, other = call(x)
        one.add_(1)
        return one, other

    return (f, step), (laid_out(mesh, [Shard(0)], 4, 6, grad=False),)


@row()
def output_is_a_view_of_an_input(mesh, rank):
    """A view of an input is returned beside a sum."""
    return lambda x: (x.view(4, 2, 3), x.sum()), (laid_out(mesh, [Shard(0)], 4, 6),)


@row()
def output_is_an_input(mesh, rank):
    """An input is returned, beside what is made of it."""
    return lambda x: (x, x * 2), (laid_out(mesh, [Shard(0)], 4, 6),)


@row()
def output_is_the_local_tensor(mesh, rank):
    """``to_local`` of an input is returned."""
    return lambda x: (x.to_local(), x * 2), (laid_out(mesh, [Shard(0)], 4, 6),)


@row(trained=False)
def row_of_an_input_written(mesh, rank):
    """A row of a sharded input is written."""

    def f(x):
        x[1] = 0.5
        x[:, 2:4].mul_(2)
        return x.sum(0)

    return f, (laid_out(mesh, [Shard(0)], 4, 6, grad=False),)


@row()
def written_after_a_view(mesh, rank):
    """A view, then a write to its base, with gradients."""

    def f(x):
        y = x * 2
        v = y.view(4, 2, 3)
        y.mul_(3)
        return v.sin()

    return f, (laid_out(mesh, [Shard(0)], 4, 6),)


@row(trained=False)
def data_pointers_of_shards(mesh, rank):
    """``copy_`` between shards of plain and distributed memory."""

    def f(x, plain):
        x.to_local().copy_(plain)
        return x + 1

    return f, (laid_out(mesh, [Shard(0)], 4, 6, grad=False), torch.full((2, 6), float(rank)))
