"""Autograd: hooks, checkpoints, compiled autograd, mixed precision, gradients of gradients."""

from __future__ import annotations

import functools

import torch
from comparison.program import draw, feature, mlp, trained, trained_module
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)


def _halve(parameter):
    parameter.grad.mul_(0.5)


def _branch(x):
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


@feature()
def cond_training(given):
    yield trained(given.compiled(_branch), (4,)), trained(_branch, (4,))


@feature()
def checkpointed(given):
    def run(x, y):
        return checkpoint(lambda a, b: (a @ b).relu().sin(), x, y, use_reentrant=False)

    yield trained(given.compiled(run), (4, 4), (4, 4)), trained(run, (4, 4), (4, 4))


@feature()
def checkpointed_reentrant(given):
    module = mlp()

    def run(x):
        return checkpoint(module, x, use_reentrant=True)

    x = draw(4, 8, grad=True)
    expected = trained_module(module, run, x)
    yield trained_module(module, given.compiled(run, fullgraph=False), x), expected


@feature("aot_eager")
def checkpointed_dropout(given):
    def run(x):
        return checkpoint(lambda a: torch.nn.functional.dropout(a, 0.5) * a, x, use_reentrant=False)

    out, grad = trained(given.compiled(run), (64,))
    x = draw(64)
    kept = out != 0
    yield grad != 0, (kept & (grad != 0))
    yield out[kept], (2 * x * x)[kept]


@feature()
def selective_checkpoint(given):
    def policy(ctx, op, *args, **kwargs):
        return (
            CheckpointPolicy.MUST_SAVE
            if op == torch.ops.aten.mm.default
            else CheckpointPolicy.PREFER_RECOMPUTE
        )

    def run(x, y):
        return checkpoint(
            lambda a, b: (a @ b).sigmoid() @ b,
            x,
            y,
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, policy),
        )

    yield trained(given.compiled(run), (4, 4), (4, 4)), trained(run, (4, 4), (4, 4))


@feature()
def compiled_autograd(given):
    module = mlp()
    expected = trained_module(module, module, draw(4, 8))
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield trained_module(module, given.compiled(module), draw(4, 8)), expected


@feature()
def compiled_autograd_of_eager(given):
    module = mlp()
    expected = trained_module(module, module, draw(4, 8))
    with torch._dynamo.compiled_autograd._enable(given.compiled):
        yield trained_module(module, module, draw(4, 8)), expected


@feature()
def compiled_autograd_with_hooks(given):
    def run(wrap):
        x = draw(4, grad=True)
        x.register_hook(lambda g: g * 2)
        x.register_post_accumulate_grad_hook(_halve)
        wrap(lambda a: a.sin())(x).sum().backward()
        return x.grad

    expected = run(lambda f: f)
    with torch._dynamo.config.patch(compiled_autograd=True):
        yield run(given.compiled), expected


@feature()
def hooks_of_a_graph(given):
    def run(x):
        y = x.sin()
        y.register_hook(lambda g: g * 2)
        return y.cos()

    yield trained(given.compiled(run), (4,)), trained(run, (4,))


@feature()
def hooks_of_modules(given):
    def build():
        module = mlp()
        module[0].register_forward_hook(lambda m, a, o: o * 2)
        module[0].register_forward_pre_hook(lambda m, a: (a[0] + 1,))
        module[2].register_full_backward_hook(lambda m, gi, go: tuple(g * 3 for g in gi))
        return module

    a, b = build(), build()
    yield (
        trained_module(a, given.compiled(a, fullgraph=False), draw(4, 8)),
        trained_module(b, b, draw(4, 8)),
    )


@feature()
def function_of_a_user(given):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * x.sign() * 5

    yield (
        trained(given.compiled(lambda x: Twice.apply(x.sin())), (4,)),
        trained(lambda x: Twice.apply(x.sin()), (4,)),
    )


@feature()
def function_that_writes(given):
    class Write(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, g):
            return g * 2

    def run(x):
        return Write.apply(x.clone()).sin()

    yield trained(given.compiled(run, fullgraph=False), (4,)), trained(run, (4,))


@feature()
def autocast(given):
    module = mlp()
    call = given.compiled(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = trained_module(module, module, draw(4, 8))
        yield (
            [t.float().mul(0.05).round() for t in trained_module(module, call, draw(4, 8))],
            [t.float().mul(0.05).round() for t in expected],
        )


@feature()
def scaler(given):
    def run(wrap):
        module = mlp()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        scaled = torch.amp.GradScaler("cpu")
        call = wrap(module)
        for at in range(2):
            optimizer.zero_grad()
            scaled.scale(call(draw(4, 8, seed=at)).sum()).backward()
            scaled.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaled.step(optimizer)
            scaled.update()
        return list(module.parameters())

    yield run(given.compiled), run(lambda f: f)


@feature()
def saved_tensor_hooks(given):
    def run(wrap):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t + 0):
            return trained(wrap(lambda x: x.sin().exp()), (4,))

    yield run(lambda f: given.compiled(f, fullgraph=False)), run(lambda f: f)


@feature()
def gradient_inside(given):
    def run(x):
        (g,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        return g * 2

    x = draw(4, grad=True)
    yield given.compiled(run, fullgraph=False)(x), run(x)


@feature()
def inputs_that_are_written(given):
    def run(x, y):
        x.mul_(2)
        y.view(-1)[:4].add_(1)
        return x + y

    a, b, c, d = draw(4, 4), draw(4, 4, seed=1), draw(4, 4), draw(4, 4, seed=1)
    yield [given.compiled(run)(a, b), a, b], [run(c, d), c, d]


@feature()
def scheduled_optimizer(given):
    for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop):

        def run(wrap, kind=kind):
            module = mlp()
            optimizer = kind(
                module.parameters(), lr=torch.tensor(0.1) if kind is torch.optim.AdamW else 0.1
            )
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            step = wrap(lambda: optimizer.step())
            for at in range(3):
                module(draw(4, 8, seed=at)).sum().backward()
                step()
                schedule.step()
                optimizer.zero_grad()
            return list(module.parameters())

        yield run(lambda f: given.compiled(f, fullgraph=False)), run(lambda f: f)
