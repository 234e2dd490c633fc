"""Operators and kernels of users."""

from __future__ import annotations

import torch
from comparison.feature import Given, Pairs, draw, feature, trained
from comparison.outcome import Unfit
from torch.library import Library, custom_op

_BOTH = ("eager", "aot_eager", "lowered")


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


_LIBRARY = Library("beside_stock_old", "DEF")
_LIBRARY.define("twice(Tensor x) -> Tensor")
_LIBRARY.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
_LIBRARY.impl("twice", lambda x: torch.empty_like(x), "Meta")
_LIBRARY.define("thrice(Tensor x) -> Tensor")
_LIBRARY.impl("thrice", lambda x: x * 3, "CompositeImplicitAutograd")


@feature(*_BOTH)
def operator(given: Given) -> Pairs:
    def run(x):
        return scaled(x.sin(), 3.0)

    yield trained(given.compiled(run), (4,)), trained(lambda x: x.sin() * 3, (4,))


@feature(*_BOTH)
def operator_that_writes(given: Given) -> Pairs:
    def run(x):
        y = x.clone()
        increase_(y[1:])
        increase_(x)
        return y * 2

    a, b = draw(4), draw(4)
    yield [given.compiled(run)(a), a], [run(b), b]


@feature(*_BOTH)
def operator_of_lists(given: Given) -> Pairs:
    yield given.compiled(lambda x: split(x.sin())[1] * 2)(draw(4)), draw(4).sin()[1:] * 2


@feature(*_BOTH)
def operator_of_unknown_size(given: Given) -> Pairs:
    yield given.compiled(lambda x: positive(x).sum() * 2)(draw(9)), draw(9).relu().sum() * 2


@feature(*_BOTH)
def operator_under_vmap(given: Given) -> Pairs:
    yield (
        given.compiled(lambda x: torch.vmap(lambda a: scaled(a, 2.0))(x))(draw(3, 4)),
        draw(3, 4) * 2,
    )


@feature(*_BOTH)
def operator_under_grad(given: Given) -> Pairs:
    def run(x):
        return torch.func.grad(lambda a: scaled(a.sin(), 2.0).sum())(x)

    yield given.compiled(run)(draw(4)), draw(4).cos() * 2


@feature(*_BOTH)
def operator_in_cond(given: Given) -> Pairs:
    def run(x):
        return torch.cond(x.sum() > 0, lambda a: scaled(a, 2.0), lambda a: scaled(a, 3.0), (x,))

    yield trained(given.compiled(run), (4,)), trained(run, (4,))


@feature(*_BOTH)
def operators_of_a_library(given: Given) -> Pairs:
    ops = torch.ops.beside_stock_old
    yield given.compiled(lambda x: ops.twice(x) + ops.thrice(x))(draw(4)), draw(4) * 5


@feature(*_BOTH)
def operator_without_gradient(given: Given) -> Pairs:
    ops = torch.ops.beside_stock_old
    x = draw(4, grad=True)
    given.compiled(lambda x: ops.thrice(x))(x).sum().backward()
    yield x.grad, torch.full((4,), 3.0)


@feature("eager")
def checked(given: Given) -> Pairs:
    torch.library.opcheck(scaled, (draw(4, grad=True), 2.0))
    torch.library.opcheck(increase_, (draw(4),))
    yield True, True


@feature("aot_eager", "lowered")
def kernel_of_triton(given: Given) -> Pairs:
    try:
        import triton
        import triton.language as tl
    except ImportError as error:
        raise Unfit(str(error)) from error
    if not torch.cuda.is_available():
        raise Unfit("no device that Triton compiles for")

    @triton.jit
    def double(x, out, n: tl.constexpr):
        at = tl.arange(0, n)
        tl.store(out + at, tl.load(x + at) * 2)

    def run(x):
        out = torch.empty_like(x)
        double[(1,)](x, out, 8)
        return out.sin()

    x = draw(8).cuda()
    yield given.compiled(run)(x), (x * 2).sin()


@feature("aot_eager", "lowered")
def in_graph_by_request(given: Given) -> Pairs:
    @torch._dynamo.allow_in_graph
    def taken(x):
        return x.sin() * 2

    yield given.compiled(lambda x: taken(x) + 1)(draw(4)), draw(4).sin() * 2 + 1


@feature("aot_eager", "lowered")
def constant_by_request(given: Given) -> Pairs:
    @torch.compiler.assume_constant_result
    def constant():
        return 3

    yield given.compiled(lambda x: x * constant())(draw(4)), draw(4) * 3


@feature("aot_eager", "lowered")
def left_out_by_request(given: Given) -> Pairs:
    @torch.compiler.disable
    def outside(x):
        return x * float(x.sum())

    x = draw(4)
    yield given.compiled(lambda x: outside(x.sin()) + 1, fullgraph=False)(x), outside(x.sin()) + 1
