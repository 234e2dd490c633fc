"""torch.func: vmap, forward and reverse derivatives, functional calls; alone, compiled, and over what is compiled."""

from __future__ import annotations

import torch
from comparison.feature import Given, Pairs, draw, feature, mlp, trained
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    stack_module_state,
    vjp,
    vmap,
)

_ALONE = ("eager", "aot_eager", "lowered")


def _f(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum()


def _both(given: Given, run, *inputs) -> Pairs:
    yield given.compiled(run)(*inputs), run(*inputs)


@feature(*_ALONE)
def mapped(given: Given) -> Pairs:
    yield from _both(given, lambda x, y: vmap(torch.dot)(x, y), draw(3, 4), draw(3, 4, seed=1))


@feature(*_ALONE)
def mapped_with_random(given: Given) -> Pairs:
    def run(x):
        return vmap(lambda a: a + torch.rand_like(a) * 0, randomness="different")(x)

    yield from _both(given, run, draw(3, 4))


@feature(*_ALONE)
def mapped_trained(given: Given) -> Pairs:
    def run(x, y):
        return vmap(lambda a, b: (a @ b).relu(), in_dims=(0, None))(x, y)

    yield trained(given.compiled(run), (3, 4, 4), (4, 2)), trained(run, (3, 4, 4), (4, 2))


@feature(*_ALONE)
def differentiated(given: Given) -> Pairs:
    yield from _both(given, lambda x: grad(_f)(x), draw(4))


@feature(*_ALONE)
def differentiated_with_value(given: Given) -> Pairs:
    yield from _both(given, lambda x: grad_and_value(_f)(x), draw(4))


@feature(*_ALONE)
def forward_derivative(given: Given) -> Pairs:
    yield from _both(given, lambda x, t: jvp(torch.tanh, (x,), (t,)), draw(4), draw(4, seed=1))


@feature(*_ALONE)
def reverse_derivative(given: Given) -> Pairs:
    yield from _both(given, lambda x, t: vjp(torch.tanh, x)[1](t), draw(4), draw(4, seed=1))


@feature(*_ALONE)
def jacobians(given: Given) -> Pairs:
    yield from _both(given, lambda x: (jacrev(torch.sin)(x), jacfwd(torch.sin)(x)), draw(4))


@feature(*_ALONE)
def second_derivatives(given: Given) -> Pairs:
    yield from _both(given, lambda x: hessian(_f)(x), draw(4))


@feature("eager")
def linear(given: Given) -> Pairs:
    x, t = draw(4), draw(4, seed=1)
    out, along = linearize(torch.sin, x)
    yield [out, along(t)], [x.sin(), x.cos() * t]


@feature(*_ALONE)
def gradients_of_samples(given: Given) -> Pairs:
    module = mlp()
    parameters = {n: p.detach() for n, p in module.named_parameters()}

    def run(parameters, x):
        def loss(p, a):
            return functional_call(module, p, (a,)).square().sum()

        return vmap(grad(loss), in_dims=(None, 0))(parameters, x)

    yield from _both(given, run, parameters, draw(3, 8))


@feature(*_ALONE)
def ensemble(given: Given) -> Pairs:
    models = [mlp(seed) for seed in range(3)]
    parameters, _ = stack_module_state(models)
    base = models[0]

    def run(parameters, x):
        return vmap(lambda p, a: functional_call(base, p, (a,)), in_dims=(0, None))(parameters, x)

    x = draw(2, 8)
    yield given.compiled(run)(parameters, x), torch.stack([m(x) for m in models])


@feature(*_ALONE)
def functionalized(given: Given) -> Pairs:
    def run(x):
        y = x.clone()
        y.add_(1)[0].mul_(3)
        return y

    yield given.compiled(lambda x: functionalize(run)(x), fullgraph=False)(draw(4)), run(draw(4))


@feature("aot_eager", "lowered")
def mapped_over_compiled(given: Given) -> Pairs:
    call = given.compiled(lambda a: a.sin() * 2, fullgraph=False)
    yield vmap(call)(draw(3, 4)), draw(3, 4).sin() * 2


@feature("aot_eager", "lowered")
def dual_numbers(given: Given) -> Pairs:
    import torch.autograd.forward_ad as fwd

    def run(x, t):
        with fwd.dual_level():
            return fwd.unpack_dual(fwd.make_dual(x, t).sin()).tangent

    x, t = draw(4), draw(4, seed=1)
    yield given.compiled(run, fullgraph=False)(x, t), x.cos() * t


@feature(*_ALONE)
def loops(given: Given) -> Pairs:
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
def scanned_training(given: Given) -> Pairs:
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
