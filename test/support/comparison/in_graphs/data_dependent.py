"""Sizes and branches that depend on data, and other operators

On DTensors, with results whose sizes ranks cannot know before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from comparison.row import drawn, ids, laid_out, row
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor


def _numbers(mesh, placement=None):
    return distribute_tensor(ids(3, 0, 5, 0, 5, 1, 0, 2), mesh, [placement or Shard(0)])


def _x(mesh, placement=None, grad=False):
    return laid_out(mesh, [placement or Shard(0)], 8, 4, grad=grad)


@row()
def nonzero_of_shards(mesh, rank):
    """``nonzero`` of a sharded tensor."""
    return lambda x: x.nonzero(), (_numbers(mesh),)


@row()
def nonzero_of_replicas(mesh, rank):
    """``nonzero`` of a replica, then computed with."""
    return lambda x: x.nonzero() * 2, (_numbers(mesh, Replicate()),)


@row()
def nonzero_as_tuple(mesh, rank):
    """``nonzero(as_tuple=True)`` and one argument of ``where``."""
    return lambda x: (x.nonzero(as_tuple=True)[0], torch.where(x > 2)[0]), (_numbers(mesh),)


@row()
def argwhere_counted(mesh, rank):
    """How many ``argwhere`` finds."""
    return lambda x: torch.argwhere(x > 0).shape[0], (_x(mesh),)


@row()
def unique_values(mesh, rank):
    """``unique``."""
    return lambda x: x.unique(), (_numbers(mesh),)


@row()
def unique_with_counts(mesh, rank):
    """``unique`` with counts and the inverse."""
    return lambda x: x.unique(return_counts=True, return_inverse=True), (_numbers(mesh),)


@row()
def boolean_rows_read(mesh, rank):
    """``x[mask]`` by rows."""
    return lambda x: x[x[:, 0] > 0] * 2, (_x(mesh, grad=True),)


@row()
def boolean_elements_read(mesh, rank):
    """``x[x > 0]``."""
    return lambda x: x[x > 0].sum(), (_x(mesh, grad=True),)


@row()
def boolean_written(mesh, rank):
    """``x[x < 0] = 0``."""

    def f(x):
        x = x * 2
        x[x < 0] = 0.0
        return x

    return f, (_x(mesh, grad=True),)


@row()
def boolean_written_with_values(mesh, rank):
    """``x[mask] = y[mask]`` by rows."""

    def f(x, y):
        x = x * 2
        mask = y[:, 0] > 0
        x[mask] = y[mask]
        return x

    return f, (_x(mesh), laid_out(mesh, [Shard(0)], 8, 4, seed=1, grad=False))


@row()
def masked_selected(mesh, rank):
    """``masked_select``."""
    return lambda x: x.masked_select(x > 0).square(), (_x(mesh, grad=True),)


@row()
def bincount_of_shards(mesh, rank):
    """``bincount`` of a sharded tensor, its length from the data."""
    return lambda x: torch.bincount(x), (_numbers(mesh),)


@row()
def bincount_with_length(mesh, rank):
    """``bincount(minlength=8)``."""
    return lambda x: torch.bincount(x, minlength=8).float() * 2, (_numbers(mesh),)


@row()
def topk_of_known_size(mesh, rank):
    """``topk`` along the sharded dimension."""
    return lambda x: x.topk(3, dim=0).values.sin(), (_x(mesh, grad=True),)


@row(truth="plugin")
def topk_of_unknown_size(mesh, rank):
    """``topk`` of as many as are positive."""

    def f(x):
        k = (x[:, 0] > 0).sum().item()
        return x[:, 0].topk(k).values

    return f, (_x(mesh),)


@row()
def one_hot_without_classes(mesh, rank):
    """``one_hot`` whose classes the data says."""
    return lambda x: F.one_hot(x) * 2, (_numbers(mesh),)


@row()
def one_hot_with_classes(mesh, rank):
    """``one_hot(num_classes=8)`` in a product."""
    return lambda x, y: F.one_hot(x, 8).float().t() @ y, (_numbers(mesh), _x(mesh, grad=True))


@row()
def interpolated(mesh, rank):
    """``interpolate``, bilinear, of images sharded by batch."""
    x = laid_out(mesh, [Shard(0)], 4, 2, 4, 4)
    return lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").sin(), (x,)


@row()
def interpolated_channels(mesh, rank):
    """``interpolate``, nearest, of images sharded by channels."""
    x = laid_out(mesh, [Shard(1)], 2, 4, 4, 4)
    return lambda x: F.interpolate(x, size=(6, 6), mode="nearest").sin(), (x,)


@row()
def interpolated_height(mesh, rank):
    """``interpolate`` along the sharded dimension."""
    x = laid_out(mesh, [Shard(2)], 2, 2, 4, 4)
    return lambda x: F.interpolate(x, scale_factor=2, mode="bilinear").sin(), (x,)


@row(trained=False)
def cond_over_dtensors(mesh, rank):
    """``torch.cond`` whose condition is a DTensor."""

    def f(x):
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    return f, (_x(mesh),)


@row(trained=False)
def cond_on_a_plain_condition(mesh, rank):
    """``torch.cond`` over DTensors by a plain condition."""

    def f(x, c):
        return torch.cond(c.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))

    return f, (_x(mesh), drawn(3))


@row(trained=False)
def cond_with_collectives(mesh, rank):
    """``torch.cond`` whose branches redistribute."""

    def f(x, c):
        return torch.cond(
            c.sum() > 0, lambda x: x.sum(0).full_tensor(), lambda x: x.amax(0).full_tensor(), (x,)
        )

    return f, (_x(mesh), drawn(3))


@row()
def cond_with_gradients(mesh, rank):
    """``torch.cond`` over a DTensor that requires gradients."""

    def f(x, c):
        return torch.cond(c.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))

    return f, (_x(mesh, grad=True), drawn(3))


@row(trained=False)
def while_over_dtensors(mesh, rank):
    """``while_loop`` that carries a DTensor."""
    from torch._higher_order_ops import while_loop

    def f(i, x):
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (i, x))

    return f, (torch.tensor(0), _x(mesh))


@row(trained=False)
def branch_on_a_sum(mesh, rank):
    """``if x.sum() > 0`` in Python."""

    def f(x):
        return x * 2 if x.sum() > 0 else x - 1

    return f, (_x(mesh),)


@row(trained=False)
def item_in_a_slice(mesh, rank):
    """A slice up to ``item()`` of a DTensor."""

    def f(n, x):
        return x[: n.max().item()] * 2

    return f, (_numbers(mesh), _x(mesh, Replicate()))


@row()
def repeated_by_a_tensor(mesh, rank):
    """``repeat_interleave`` by counts in a DTensor."""
    return lambda x, n: x.repeat_interleave(n, 0), (_x(mesh), _numbers(mesh))


class _Recurrent(nn.Module):
    def __init__(self, kind, mesh):
        super().__init__()
        torch.manual_seed(0)
        self.net = kind(4, 4, batch_first=True)
        for name, value in list(self.net.named_parameters()):
            whole = nn.Parameter(distribute_tensor(value.detach(), mesh, [Replicate()]))
            setattr(self.net, name, whole)

    def forward(self, x, start):
        return self.net(x, start)[0]


@row()
def lstm(mesh, rank):
    """``nn.LSTM`` on sequences sharded by batch, with replicated parameters."""
    start = tuple(laid_out(mesh, [Shard(1)], 1, 4, 4, seed=s) for s in (1, 2))
    return _Recurrent(nn.LSTM, mesh), (laid_out(mesh, [Shard(0)], 4, 3, 4), start)


@row()
def gru(mesh, rank):
    """``nn.GRU`` likewise."""
    start = laid_out(mesh, [Shard(1)], 1, 4, 4, seed=1)
    return _Recurrent(nn.GRU, mesh), (laid_out(mesh, [Shard(0)], 4, 3, 4), start)


@row()
def searched(mesh, rank):
    """``searchsorted`` and ``histc`` of shards."""

    def f(x, edges):
        return torch.searchsorted(edges, x), torch.histc(x, 4, -2, 2)

    edges = distribute_tensor(torch.tensor([-1.0, 0.0, 1.0]), mesh, [Replicate()])
    return f, (_x(mesh), edges)


@row()
def router_of_experts(mesh, rank):
    """A router: softmax, ``topk``, a mask of the chosen experts, and how many tokens each gets."""

    def f(x, w):
        score, chosen = (x @ w).softmax(-1).topk(2, -1)
        mask = F.one_hot(chosen, 4).sum(1)
        return score, mask.sum(0)

    return f, (_x(mesh, grad=True), laid_out(mesh, [Replicate()], 4, 4, seed=1))
