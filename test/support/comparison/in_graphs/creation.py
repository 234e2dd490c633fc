"""DTensors made inside

By factories, ``distribute_tensor``, ``distribute_module`` and ``nn.Parameter``.
"""

from __future__ import annotations

import torch
import torch.distributed.tensor as dt
from comparison.row import drawn, laid_out, row
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor


@row()
def zeros_and_ones(mesh, rank):
    """``zeros``, ``ones``, ``full`` and ``empty`` with uneven shards."""

    def f(x):
        made = [dt.zeros(5, 4, device_mesh=mesh, placements=[Shard(0)])]
        made += [dt.ones(5, 4, device_mesh=mesh, placements=[Shard(0)])]
        made += [dt.full((5, 4), 2.0, device_mesh=mesh, placements=[Shard(0)])]
        return x + made[0] + made[1] * made[2]

    return f, (laid_out(mesh, [Shard(0)], 5, 4),)


@row()
def like_another(mesh, rank):
    """``zeros_like``, ``new_ones``, ``full_like``, ``empty_like().fill_()``."""

    def f(x):
        y = x + torch.zeros_like(x) + torch.full_like(x, 2.0)
        return y * x.new_ones(5, 4) + torch.empty_like(x).fill_(1)

    return f, (laid_out(mesh, [Shard(0)], 5, 4),)


@row()
def distributed_inside(mesh, rank):
    """``distribute_tensor`` inside, of a tensor that rank 0 has."""

    def f(x, a):
        return x + distribute_tensor(a, mesh, [Shard(0)])

    return f, (laid_out(mesh, [Shard(0)], 5, 4), drawn(5, 4, seed=rank))


@row()
def distributed_constant(mesh, rank):
    """``distribute_tensor`` of a tensor made inside."""

    def f(x):
        return x * distribute_tensor(torch.arange(5.0)[:, None], mesh, [Shard(0)])

    return f, (laid_out(mesh, [Shard(0)], 5, 4),)


@row(trained=False)
def module_distributed_inside(mesh, rank):
    """``distribute_module`` inside."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)

    def f(x):
        return distribute_module(model, mesh)(x)

    return f, (laid_out(mesh, [Shard(0)], 4, 4, grad=False),)


@row(trained=False)
def module_made_and_distributed(mesh, rank):
    """A module made inside and distributed."""

    def f(x):
        model = nn.Linear(4, 4, bias=False)
        nn.init.ones_(model.weight)
        return distribute_module(model, mesh)(x)

    return f, (laid_out(mesh, [Shard(0)], 4, 4, grad=False),)


@row(trained=False)
def parameter_made(mesh, rank):
    """``nn.Parameter`` of a DTensor inside."""

    def f(x):
        p = nn.Parameter(x * 2)
        return p + 1, isinstance(p, nn.Parameter)

    return f, (laid_out(mesh, [Shard(0)], 4, 4, grad=False),)


@row(trained=False)
def parameter_made_without_gradient(mesh, rank):
    """``nn.Parameter(..., requires_grad=False)`` of a DTensor inside."""

    def f(x):
        return nn.Parameter(x * 2, requires_grad=False) + 1

    return f, (laid_out(mesh, [Shard(0)], 4, 4, grad=False),)


@row()
def made_with_gradient(mesh, rank):
    """``torch.ones(requires_grad=True)`` of DTensors inside."""

    def f(x):
        y = dt.ones(4, 4, device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
        return x * y

    return f, (laid_out(mesh, [Shard(0)], 4, 4),)


@row()
def random_made(mesh, rank):
    """``rand_like(x) * 0`` and dropout of nothing."""

    def f(x):
        return x + torch.rand_like(x) * 0 + nn.functional.dropout(x, 0.0)

    return f, (laid_out(mesh, [Shard(0)], 5, 4),)


@row()
def arange_beside(mesh, rank):
    """A plain ``arange`` made a replica, as a mask of positions."""

    def f(x):
        at = DTensor.from_local(torch.arange(x.shape[1]), mesh, [Replicate()])
        return x.masked_fill(at[None, :] > 2, 0.0)

    return f, (laid_out(mesh, [Shard(0)], 5, 4),)


@row()
def mesh_equal_to_an_earlier_one(mesh, rank):
    """A program run in eager mode on another mesh that is equal, then compiled on this one."""
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def f(x):
        return (x * 3).sin()

    f(laid_out(other, [Shard(0)], 4, 4))
    return f, (laid_out(mesh, [Shard(0)], 4, 4),)
