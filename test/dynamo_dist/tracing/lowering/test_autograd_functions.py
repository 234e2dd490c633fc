"""Tensor parallelism by hand: autograd functions that reduce in place, forward and backward,
around views of values.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.autograd import Function
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("mesh", "enabled")


class Copy(Function):
    """A column-parallel layer's argument: its gradients are summed, in place."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        dist.all_reduce(g)
        return g


class Reduce(Function):
    """A row-parallel layer's result."""

    @staticmethod
    def forward(ctx, x):
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Doubled(Function):
    """Writes to its gradient without a collective."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g.mul_(2)


class Pair(Function):
    @staticmethod
    def forward(ctx, x):
        return x[0], x[1]

    @staticmethod
    def backward(ctx, one, other):
        dist.all_reduce(one)
        return torch.stack([one, other.mul_(3)])


def embedded(ids, weight):
    """A vocabulary-parallel embedding, as Megatron writes it."""
    missing = (ids < 2) | (ids >= 6)
    own = ids.clone() - 2
    own[missing] = 0
    found = F.embedding(own, weight)
    found[missing, :] = 0.0
    return Reduce.apply(found)


IDS = torch.tensor([[0, 3, 5], [7, 2, 4]])
PROGRAMS = {
    "rows of one value": lambda x: Copy.apply(x[0]) + Copy.apply(x[1]),
    "chunks": lambda x: sum(map(Copy.apply, x.chunk(2, -1))),
    "used beside": lambda x: Copy.apply(x[0]) * 2 + x[0] + x[1],
    "transposed": lambda x: Copy.apply(x.t()) * 2,
    "one after the other": lambda x: Reduce.apply(Copy.apply(x) * 2),
    "without a collective": lambda x: Doubled.apply(x[0]) + Doubled.apply(x[1]) * x[2],
    "several results": lambda x: torch.mul(*Pair.apply(x[:2])),
    "embedding": lambda x: embedded(IDS, x),
    "embedding, then a layer": lambda x: F.linear(Copy.apply(embedded(IDS, x)), x.detach()),
    "views of a value inside": lambda x: sum(Copy.apply(each) for each in (x * 2).unbind()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers(name):
    def gradient(run):
        x = torch.linspace(0, 1, 16).view(4, 4).requires_grad_()
        y = run(x)
        return torch.autograd.grad(y, x, torch.linspace(1, 2, y.numel()).view(y.shape))[0]

    expected = gradient(PROGRAMS[name])
    run = torch.compile(PROGRAMS[name], backend="aot_eager", fullgraph=True)
    assert_close(gradient(run), expected)
