"""Autograd inside

``torch.autograd.grad``, double backward, ``.data``, hooks and checkpoints of single tensors.
"""

from __future__ import annotations

import torch
from comparison.row import laid_out, row
from torch.distributed.tensor import Partial, Replicate, Shard


@row(trained=False)
def data_assigned(mesh, rank):
    """``x.data = y``."""

    def f(x, y):
        x.data = y * 2
        return x + 1

    x, y = (laid_out(mesh, [Shard(0)], 4, 4, seed=s, grad=False) for s in (0, 1))
    return f, (x, y)


@row()
def data_read(mesh, rank):
    """``x.data`` in an expression."""
    return lambda x: x * x.data.sum(0), (laid_out(mesh, [Shard(0)], 4, 4),)


@row(trained=False)
def data_written(mesh, rank):
    """``x.data.mul_(2)`` of a parameter."""

    def f(x):
        x.data.mul_(2)
        return x.detach() + 1

    return f, (laid_out(mesh, [Shard(0)], 4, 4),)


@row(trained=False)
def gradient_inside(mesh, rank):
    """``torch.autograd.grad`` inside."""

    def f(x):
        return torch.autograd.grad(x.sin().sum(), x)[0] * 2

    return f, (laid_out(mesh, [Shard(0)], 4, 4),)


@row(trained=False)
def gradient_of_a_full_tensor(mesh, rank):
    """``torch.autograd.grad`` through ``full_tensor``."""

    def f(x):
        return torch.autograd.grad(x.sin().full_tensor().square().sum(), x)[0]

    return f, (laid_out(mesh, [Shard(0)], 4, 4),)


@row(trained=False)
def gradient_of_a_gradient(mesh, rank):
    """``torch.autograd.grad(create_graph=True)``, and the gradient of its norm."""

    def f(x):
        (g,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    return f, (laid_out(mesh, [Shard(0)], 4, 4),)


@row()
def gradient_penalty(mesh, rank):
    """A loss that holds the norm of a gradient, trained."""

    def f(x, w):
        y = (x @ w).sin()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + g.square().mean()

    x, w = laid_out(mesh, [Shard(0)], 4, 4), laid_out(mesh, [Replicate()], 4, 4, seed=1)
    return f, (x, w)


@row(trained=False)
def double_backward_outside(mesh, rank):
    """The gradient of a gradient of a compiled function, both taken outside."""

    def f(x):
        return (x**3).sum().full_tensor()

    def step(call, x):
        (g,) = torch.autograd.grad(call(x), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    return (f, step), (laid_out(mesh, [Shard(0)], 4, 4),)


@row(trained=False)
def backward_inside(mesh, rank):
    """``loss.backward()`` inside."""

    def f(x):
        x.square().sum().backward()

    return f, (laid_out(mesh, [Shard(0)], 4, 4),)


@row()
def gradient_retained(mesh, rank):
    """``retain_grad`` of a value inside."""

    def f(x):
        y = x * 2
        y.retain_grad()
        return y.sin()

    return f, (laid_out(mesh, [Shard(0)], 4, 4),)


@row()
def hook_on_a_value(mesh, rank):
    """``register_hook`` of a value inside, which changes its gradient."""

    def f(x):
        y = x * 2
        y.register_hook(lambda g: g * 3)
        return y.sin()

    return f, (laid_out(mesh, [Shard(0)], 4, 4),)


@row()
def hook_that_reduces(mesh, rank):
    """A hook that redistributes the gradient it gets."""

    def f(x):
        y = x * 2
        y.register_hook(lambda g: g.redistribute(placements=[Replicate()]) * 3)
        return y.sin()

    return f, (laid_out(mesh, [Shard(0)], 4, 4),)


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return 2 * g * ctx.saved_tensors[0].cos()


@row()
def autograd_function(mesh, rank):
    """An ``autograd.Function`` on DTensors."""
    return lambda x: _Scaled.apply(x) * 2, (laid_out(mesh, [Shard(0)], 4, 4),)


@row()
def detached_and_asked(mesh, rank):
    """``detach().requires_grad_()`` inside."""

    def f(x):
        y = (x * 2).detach().requires_grad_()
        return (y * x).sum()

    return f, (laid_out(mesh, [Shard(0)], 4, 4),)


@row()
def no_grad_inside(mesh, rank):
    """A part under ``no_grad``, a part under ``enable_grad``."""

    def f(x):
        with torch.no_grad():
            scale = x.abs().amax()
        return (x / scale).sin()

    return f, (laid_out(mesh, [Shard(0)], 4, 4),)


@row(trained=False)
def functional_gradient(mesh, rank):
    """``torch.func.grad``."""

    def f(x):
        return torch.func.grad(lambda t: t.sin().sum().full_tensor())(x)

    return f, (laid_out(mesh, [Shard(0)], 4, 4, grad=False),)


@row(trained=False)
def mapped_over_rows(mesh, rank):
    """``torch.func.vmap`` over a whole dimension."""
    return torch.func.vmap(lambda t: t.sin() * 2), (laid_out(mesh, [Shard(1)], 4, 4, grad=False),)


@row()
def gradient_laid_out(mesh, rank):
    """``to_local(grad_placements=...)``, with gradients pending as a sum."""

    def f(x):
        return x.to_local(grad_placements=[Partial()]) * (rank + 1)

    return f, (laid_out(mesh, [Replicate()], 4, 4),)
