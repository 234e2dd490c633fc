"""torch.func: vmap, forward and reverse derivatives, functional calls; alone, compiled, and over
what is compiled.
"""

from __future__ import annotations

import torch
from comparison.program import EVERY, draw, feature, mlp, trained
from torch.func import (
    functional_call,
    grad,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)


def _f(x):
    return (x.sin() * x).sum()


def _both(given, run, *inputs):
    yield given.compiled(run)(*inputs), run(*inputs)


@feature()
def mapped_trained(given):
    def run(x, y):
        return vmap(lambda a, b: (a @ b).relu(), in_dims=(0, None))(x, y)

    yield trained(given.compiled(run), (3, 4, 4), (4, 2)), trained(run, (3, 4, 4), (4, 2))


@feature()
def forward_derivative(given):
    yield from _both(given, lambda x, t: jvp(torch.tanh, (x,), (t,)), draw(4), draw(4, seed=1))


@feature()
def reverse_derivative(given):
    yield from _both(given, lambda x, t: vjp(torch.tanh, x)[1](t), draw(4), draw(4, seed=1))


@feature()
def jacobians(given):
    yield from _both(given, lambda x: (jacrev(torch.sin)(x), jacfwd(torch.sin)(x)), draw(4))


@feature()
def gradients_of_samples(given):
    module = mlp()
    parameters = {n: p.detach() for n, p in module.named_parameters()}

    def run(parameters, x):
        def loss(p, a):
            return functional_call(module, p, (a,)).square().sum()

        return vmap(grad(loss), in_dims=(None, 0))(parameters, x)

    yield from _both(given, run, parameters, draw(3, 8))


@feature(*EVERY)
def ensemble(given):
    models = [mlp(seed) for seed in range(3)]
    parameters, _ = stack_module_state(models)
    base = models[0]

    def run(parameters, x):
        return vmap(lambda p, a: functional_call(base, p, (a,)), in_dims=(0, None))(parameters, x)

    x = draw(2, 8)
    yield given.compiled(run)(parameters, x), torch.stack([m(x) for m in models])


@feature("aot_eager", "lowered")
def mapped_over_compiled(given):
    call = given.compiled(lambda a: a.sin() * 2, fullgraph=False)
    yield vmap(call)(draw(3, 4)), draw(3, 4).sin() * 2


@feature("aot_eager", "lowered")
def dual_numbers(given):
    import torch.autograd.forward_ad as fwd

    def run(x, t):
        with fwd.dual_level():
            return fwd.unpack_dual(fwd.make_dual(x, t).sin()).tangent

    x, t = draw(4), draw(4, seed=1)
    yield given.compiled(run, fullgraph=False)(x, t), x.cos() * t


@feature(*EVERY)
def loops(given):
    from torch._higher_order_ops import associative_scan, scan, while_loop

    def run(x):
        _, sums = scan(lambda c, a: (c + a, c * a), torch.zeros(4), x)
        total = associative_scan(lambda a, b: a + b, x, 0, combine_mode="generic")
        count, last = while_loop(
            lambda i, a: i < 3, lambda i, a: (i + 1, a.sin()), (torch.tensor(0), x)
        )
        return sums, total, count, last

    x = draw(3, 4)
    carry, sums = torch.zeros(4), []
    for row in x:
        sums.append(carry * row)
        carry = carry + row
    yield (
        given.compiled(run)(x),
        (torch.stack(sums), x.cumsum(0), torch.tensor(3), x.sin().sin().sin()),
    )


@feature("aot_eager", "lowered")
def scanned_training(given):
    from torch._higher_order_ops import scan

    def run(start, x):
        last, all_ = scan(lambda c, a: (c * a.sin(), c + a), start, x)
        return last, all_

    def loop(start, x):
        out = []
        for row in x:
            out.append(start + row)
            start = start * row.sin()
        return start, torch.stack(out)

    yield trained(given.compiled(run), (4,), (3, 4)), trained(loop, (4,), (3, 4))
