"""Plain tensors among DTensors

Torch refuses them in eager mode: "got mixed torch.Tensor and DTensor".
"""

from __future__ import annotations

import torch
from comparison.row import drawn, laid_out, row
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_module
from torch.distributed.tensor.experimental import implicit_replication


@row()
def plain_added(mesh, rank):
    """A plain tensor added to a DTensor: refused."""
    return lambda x, a: x + a, (laid_out(mesh, [Shard(0)], 4, 4), drawn(4))


@row()
def plain_added_as_a_replica(mesh, rank):
    """The same under ``implicit_replication``."""

    def f(x, a):
        with implicit_replication():
            return x + a

    return f, (laid_out(mesh, [Shard(0)], 4, 4), drawn(4))


@row()
def plain_number_added(mesh, rank):
    """A plain tensor of one number in a product."""
    return lambda x, a: x * a, (laid_out(mesh, [Shard(0)], 4, 4), torch.tensor(2.0))


@row()
def plain_made_inside(mesh, rank):
    """A plain tensor made inside, in ``where``."""
    x = laid_out(mesh, [Shard(0)], 4, 4)
    return lambda x: torch.where(x > 0, x, torch.tensor(0.5)), (x,)


@row()
def plain_input_of_a_module(mesh, rank):
    """A plain input of a module whose parameters are DTensors: refused."""
    torch.manual_seed(0)
    return distribute_module(nn.Linear(4, 4), mesh), (drawn(3, 4),)


@row()
def plain_buffer_in_a_module(mesh, rank):
    """A plain index for a DTensor."""
    at = torch.tensor([0, 2])
    return lambda x: x[at] * 2, (laid_out(mesh, [Replicate()], 4, 4),)
