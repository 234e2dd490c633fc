"""Tensor subclasses of others."""

from __future__ import annotations

from typing import Any

import torch
from comparison.feature import Given, Pairs, draw, feature
from torch.utils import _pytree as pytree

_BOTH = ("eager", "aot_eager", "lowered")


class Scaled(torch.Tensor):
    """A wrapper: the value is ``inner * scale``."""

    @staticmethod
    def __new__(cls, inner, scale, requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=requires_grad
        )

    def __init__(self, inner, scale, requires_grad=False):
        self.inner, self.scale = inner, scale

    def __repr__(self) -> str:
        return f"Scaled({self.inner}, {self.scale})"

    def __tensor_flatten__(self):
        return ["inner"], {"scale": self.scale}

    @staticmethod
    def __tensor_unflatten__(inner, meta, outer_size, outer_stride):
        return Scaled(inner["inner"], meta["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (
            torch.ops.aten.detach.default,
            torch.ops.aten.t.default,
            torch.ops.aten.clone.default,
            torch.ops.aten.view.default,
        ):
            return cls(func(args[0].inner, *args[1:], **(kwargs or {})), args[0].scale)
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.inner * t.scale, (args, kwargs or {}))
        return func(*args, **kwargs)


class Named(torch.Tensor):
    """Keeps its type through functions."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


@feature(*_BOTH)
def wrapper(given: Given) -> Pairs:
    x = draw(4, 4)
    yield (
        given.compiled(lambda a, b: (a @ b).sin())(Scaled(x, 2.0), draw(4, 4)),
        (x * 2 @ draw(4, 4)).sin(),
    )


@feature(*_BOTH)
def wrapper_as_parameter(given: Given) -> Pairs:
    layer = torch.nn.Linear(4, 4, bias=False)
    weight = layer.weight.detach().clone()
    layer.weight = torch.nn.Parameter(Scaled(weight, 2.0), requires_grad=False)
    x = draw(2, 4, grad=True)
    out = given.compiled(layer)(x)
    (found,) = torch.autograd.grad(out.sum(), x)
    y = draw(2, 4, grad=True)
    yield [out, found], [y @ (weight * 2).t(), torch.ones(2, 4) @ (weight * 2)]


@feature(*_BOTH)
def two_tensors(given: Given) -> Pairs:
    from torch.testing._internal.two_tensor import TwoTensor

    def run(wrap):
        x = TwoTensor(draw(4, 4), draw(4, 4, seed=1)).requires_grad_()
        y = wrap(lambda a: (a @ a.t()).sin().sum(0))(x)
        y.sum().backward()
        return [y.a, y.b, x.grad.a, x.grad.b]

    yield run(given.compiled), run(lambda f: f)


@feature(*_BOTH)
def two_tensors_in_cond(given: Given) -> Pairs:
    from torch.testing._internal.two_tensor import TwoTensor

    def run(wrap):
        x = TwoTensor(draw(4), draw(4)).requires_grad_()
        y = wrap(lambda a: a.sin() * 2)(x)
        y.sum().backward()
        return [y.a, x.grad.b]

    yield run(given.compiled), run(lambda f: f)


@feature(*_BOTH)
def function_override(given: Given) -> Pairs:
    x = draw(4).as_subclass(Named)
    out = given.compiled(lambda a: a.sin() + 1, fullgraph=False)(x)
    yield out.as_subclass(torch.Tensor), draw(4).sin() + 1
    yield type(out).__name__, "Named"


@feature(*_BOTH)
def jagged(given: Given) -> Pairs:
    def nested() -> Any:
        return torch.nested.nested_tensor(
            [draw(2, 4), draw(3, 4, seed=1)], layout=torch.jagged, requires_grad=True
        )

    def run(wrap):
        x = nested()
        y = wrap(lambda a: a.sin() * 2)(x)
        y.values().sum().backward()
        return [y.values(), x.grad.values()]

    yield run(lambda f: given.compiled(f, fullgraph=False)), run(lambda f: f)


@feature("eager")
def masked(given: Given) -> Pairs:
    from torch.masked import masked_tensor

    x = masked_tensor(draw(4), torch.tensor([True, False, True, True]))
    yield (x * 2).sum().get_data(), (draw(4) * 2)[torch.tensor([True, False, True, True])].sum()


@feature(*_BOTH)
def sparse(given: Given) -> Pairs:
    x = draw(4, 4).relu()
    yield (
        given.compiled(lambda a, b: torch.sparse.mm(a, b), fullgraph=False)(
            x.to_sparse(), draw(4, 4)
        ),
        x @ draw(4, 4),
    )


@feature("eager")
def parameters_of_a_subclass(given: Given) -> Pairs:
    p = torch.nn.Parameter(Scaled(draw(4), 3.0), requires_grad=False)
    yield [type(p).__name__, (p + 0)], ["Scaled", draw(4) * 3]
    buffer = torch.nn.Buffer(draw(4))
    yield buffer * 1, draw(4)


@feature(*_BOTH)
def complex_and_quantized(given: Given) -> Pairs:
    def run(x):
        return torch.view_as_real(torch.view_as_complex(x).conj() * 2)

    yield given.compiled(run)(draw(4, 2)), run(draw(4, 2))
