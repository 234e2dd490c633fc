"""Optimizers and norms

Compiled steps, schedulers, several meshes, tensor subclasses inside DTensors.
"""

from __future__ import annotations

import torch
from comparison.in_graphs.subclasses import Halved, NamedDTensor
from comparison.row import laid_out, row
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard


def _params(mesh):
    made = [
        laid_out(mesh, [placement], 6, 4, seed=seed, grad=False)
        for seed, placement in enumerate([Shard(0), Shard(1), Replicate()])
    ]
    found = [nn.Parameter(each) for each in made]
    for seed, (each, value) in enumerate(zip(found, made, strict=True)):
        each.grad = torch.cos(value * (seed + 1))
    return found


def _grads(mesh, placement):
    found = nn.Parameter(laid_out(mesh, [placement], 6, 4, grad=False))
    found.grad = torch.cos(found.detach())
    return found


@row(trained=False)
def clip_grad_norm(mesh, rank):
    """``clip_grad_norm_`` over shards and replicas of one mesh."""
    params = _params(mesh)
    return lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.5), (params,)


@row(trained=False)
def clip_grad_norm_one_by_one(mesh, rank):
    """``clip_grad_norm_(foreach=False, norm_type=inf)``."""
    params = _params(mesh)
    clip = torch.nn.utils.clip_grad_norm_
    return lambda ps: clip(ps, 0.5, norm_type=float("inf"), foreach=False), (params,)


@row(2, 2, trained=False)
def clip_grad_norm_over_meshes(mesh, rank):
    """``clip_grad_norm_`` over parameters of three meshes."""
    params = [_grads(mesh["dp"], Shard(0)), _grads(mesh["tp"], Shard(1))]
    whole = nn.Parameter(laid_out(mesh, [Shard(0), Shard(1)], 6, 4, grad=False))
    whole.grad = torch.sin(whole.detach())
    return lambda ps: torch.nn.utils.clip_grad_norm_(ps, 0.5), ([*params, whole],)


@row(2, 2, trained=False)
def clip_each_mesh_apart(mesh, rank):
    """The norm of each mesh's parameters apart, then one of both, then
    ``clip_grads_with_norm_``.
    """
    params = [_grads(mesh["dp"], Shard(0)), _grads(mesh["tp"], Shard(1))]

    def f(one, other):
        norms = [
            torch.nn.utils.get_total_norm([p.grad]).full_tensor()  # type: ignore[union-attr]
            for p in (one, other)
        ]
        total = torch.stack(norms).square().sum().sqrt()
        for p in (one, other):
            torch.nn.utils.clip_grads_with_norm_([p], 0.5, total)
        return total

    return f, tuple(params)


@row(trained=False)
def clip_grad_value(mesh, rank):
    """``clip_grad_value_``."""
    return lambda ps: torch.nn.utils.clip_grad_value_(ps, 0.3), (_params(mesh),)


def _stepped(mesh, optimizer, *, steps=3):
    params = _params(mesh)
    chosen = optimizer(params)

    def step(ps):
        chosen.step()

    return step, [(params,)] * steps


@row(trained=False)
def sgd_step(mesh, rank):
    """Compiled steps of SGD with momentum."""
    return _stepped(mesh, lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9))


@row(trained=False)
def adamw_step(mesh, rank):
    """Compiled steps of AdamW."""
    return _stepped(mesh, lambda ps: torch.optim.AdamW(ps, lr=0.01))


@row(trained=False)
def adamw_step_with_lr_tensor(mesh, rank):
    """Compiled steps of AdamW with a learning rate that is a tensor."""
    lr = torch.tensor(0.01)
    return _stepped(mesh, lambda ps: torch.optim.AdamW(ps, lr=lr, capturable=False, foreach=False))


@row(trained=False)
def adam_step_with_scheduler(mesh, rank):
    """Compiled steps of Adam with a learning rate tensor and a scheduler, both inside."""
    params = _params(mesh)
    chosen = torch.optim.Adam(params, lr=torch.tensor(0.01))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(chosen, 0.5)

    def step(ps):
        chosen.step()
        scheduler.step()

    return step, [(params,)] * 3


@row(trained=False)
def adafactor_step(mesh, rank):
    """Compiled steps of Adafactor, whose state is of rows and columns."""
    return _stepped(mesh, lambda ps: torch.optim.Adafactor(ps, lr=0.1), steps=2)


@row(trained=False)
def rprop_step(mesh, rank):
    """Compiled steps of Rprop, which writes where signs are equal."""
    return _stepped(mesh, lambda ps: torch.optim.Rprop(ps, lr=0.1), steps=2)


@row(trained=False)
def orthogonalised_step(mesh, rank):
    """A step as Muon's: Newton-Schulz iterations on the gradient."""

    def step(p, g):
        x = g / g.norm()
        for _ in range(3):
            a = x @ x.mT
            x = 1.5 * x - 0.5 * a @ x
        p.sub_(x, alpha=0.1)

    p, g = (laid_out(mesh, [Shard(0)], 6, 4, seed=s, grad=False) for s in (0, 1))
    return step, (p, g)


@row(trained=False, backend="traced")
def moving_average(mesh, rank):
    """An exponential moving average of parameters, in a list."""

    def step(kept, ps):
        torch._foreach_lerp_(kept, [p.detach() for p in ps], 0.1)

    params = _params(mesh)
    return step, ([p.detach().clone() for p in params], params)


@row(trained=False)
def loss_scaled(mesh, rank):
    """Gradients unscaled and looked through for infinity, as a gradient scaler does."""

    def step(ps, scale):
        found = torch.stack([p.grad.isfinite().all().full_tensor() for p in ps]).all()
        for p in ps:
            p.grad.mul_(1 / scale)
        return found

    return step, (_params(mesh), torch.tensor(4.0))


@row(trained=False)
def subclass_state_written(mesh, rank):
    """An optimizer's state whose local tensor is a tensor subclass that keeps half of the bytes,
    written.
    """
    p = laid_out(mesh, [Shard(0)], 6, 4, grad=False)
    kept = DTensor.from_local(Halved.of(p.to_local()), mesh, [Shard(0)], run_check=False)

    def step(p, kept):
        kept.copy_(kept + p)
        return p - 0.1 * kept

    return step, (p, kept)


@row(trained=False)
def dtensor_subclass_from_outside(mesh, rank):
    """An instance of a subclass of DTensor as an argument."""
    x = laid_out(mesh, [Shard(0)], 6, 4, grad=False)
    return lambda x: x * 2, (NamedDTensor(x._local_tensor, x._spec, requires_grad=False),)


@row(trained=False)
def dtensor_subclass_made_inside(mesh, rank):
    """An instance of a subclass of DTensor made inside."""

    def f(x):
        return NamedDTensor(x._local_tensor, x._spec, requires_grad=False) * 2

    return f, (laid_out(mesh, [Shard(0)], 6, 4, grad=False),)
