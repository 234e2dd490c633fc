"""Operators and kernels of users."""

from __future__ import annotations

import torch
from comparison.outcome import Unfit
from comparison.program import EVERY, draw, feature, trained
from torch.library import Library, custom_op


@custom_op("comparison::scaled", mutates_args=())
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    """An operator with a gradient."""
    return torch.from_numpy(x.detach().numpy() * by)


@scaled.register_fake
def _(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.empty_like(x)


scaled.register_autograd(
    lambda ctx, g: (scaled(g, ctx.by), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "by", inputs[1]),
)


@scaled.register_vmap
def _(info, in_dims, x, by):
    return scaled(x, by), in_dims[0]


@custom_op("comparison::increase_", mutates_args=("x",))
def increase_(x: torch.Tensor) -> None:
    """An operator that writes."""
    x.add_(1)


@custom_op("comparison::split", mutates_args=())
def split(x: torch.Tensor) -> list[torch.Tensor]:
    """An operator with a list of results."""
    return [x[:1].clone(), x[1:].clone()]


@split.register_fake
def _(x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(x[:1]), torch.empty_like(x[1:])]


@custom_op("comparison::positive", mutates_args=())
def positive(x: torch.Tensor) -> torch.Tensor:
    """An operator whose result's size depends on values."""
    return x[x > 0].clone()


@positive.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


_LIBRARY = Library("comparison_old", "DEF")
_LIBRARY.define("twice(Tensor x) -> Tensor")
_LIBRARY.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
_LIBRARY.impl("twice", lambda x: torch.empty_like(x), "Meta")
_LIBRARY.define("thrice(Tensor x) -> Tensor")
_LIBRARY.impl("thrice", lambda x: x * 3, "CompositeImplicitAutograd")


@feature(*EVERY)
def operator(given):
    def run(x):
        return scaled(x.sin(), 3.0)

    yield trained(given.compiled(run), (4,)), trained(lambda x: x.sin() * 3, (4,))


@feature()
def operator_that_writes(given):
    def run(x):
        y = x.clone()
        increase_(y[1:])
        increase_(x)
        return y * 2

    a, b = draw(4), draw(4)
    yield [given.compiled(run)(a), a], [run(b), b]


@feature(*EVERY)
def operator_of_lists(given):
    yield given.compiled(lambda x: split(x.sin())[1] * 2)(draw(4)), draw(4).sin()[1:] * 2


@feature(*EVERY)
def operator_of_unknown_size(given):
    yield given.compiled(lambda x: positive(x).sum() * 2)(draw(9)), draw(9).relu().sum() * 2


@feature(*EVERY)
def operator_under_vmap(given):
    yield (
        given.compiled(lambda x: torch.vmap(lambda a: scaled(a, 2.0))(x))(draw(3, 4)),
        draw(3, 4) * 2,
    )


@feature(*EVERY)
def operators_of_a_library(given):
    ops = torch.ops.comparison_old
    yield given.compiled(lambda x: ops.twice(x) + ops.thrice(x))(draw(4)), draw(4) * 5


@feature("aot_eager", "lowered")
def kernel_of_triton(given):
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise Unfit(str(error)) from error
    if not torch.cuda.is_available():
        raise Unfit("no device that Triton compiles for")

    @triton.jit
    def double(x, out, n):
        at = tl.arange(0, n)
        tl.store(out + at, tl.load(x + at) * 2)

    def run(x):
        out = torch.empty_like(x)
        double[(1,)](x, out, 8)
        return out.sin()

    x = draw(8).cuda()
    yield given.compiled(run)(x), (x * 2).sin()


@feature("aot_eager", "lowered")
def in_graph_by_request(given):
    @torch._dynamo.allow_in_graph
    def taken(x):
        return x.sin() * 2

    yield given.compiled(lambda x: taken(x) + 1)(draw(4)), draw(4).sin() * 2 + 1


@feature("aot_eager", "lowered")
def constant_by_request(given):
    @torch.compiler.assume_constant_result
    def constant():
        return 3

    yield given.compiled(lambda x: x * constant())(draw(4)), draw(4) * 3


@feature("aot_eager", "lowered")
def left_out_by_request(given):
    @torch.compiler.disable
    def outside(x):
        return x * float(x.sum())

    x = draw(4)
    yield given.compiled(lambda x: outside(x.sin()) + 1, fullgraph=False)(x), outside(x.sin()) + 1
