"""Tensor subclasses of others."""

from __future__ import annotations

import torch
from comparison.program import EVERY, draw, feature
from torch.utils import _pytree as pytree


class Scaled(torch.Tensor):
    """A wrapper: the value is ``inner * scale``."""

    @staticmethod
    def __new__(cls, inner, scale, requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=requires_grad
        )

    def __init__(self, inner, scale, requires_grad=False):
        self.inner, self.scale = inner, scale

    def __repr__(self):
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


@feature(*EVERY)
def wrapper(given):
    x = draw(4, 4)
    yield (
        given.compiled(lambda a, b: (a @ b).sin())(Scaled(x, 2.0), draw(4, 4)),
        (x * 2 @ draw(4, 4)).sin(),
    )


@feature(*EVERY)
def wrapper_as_parameter(given):
    layer = torch.nn.Linear(4, 4, bias=False)
    weight = layer.weight.detach().clone()
    layer.weight = torch.nn.Parameter(Scaled(weight, 2.0), requires_grad=False)
    x = draw(2, 4, grad=True)
    out = given.compiled(layer)(x)
    (found,) = torch.autograd.grad(out.sum(), x)
    y = draw(2, 4, grad=True)
    yield [out, found], [y @ (weight * 2).t(), torch.ones(2, 4) @ (weight * 2)]


@feature()
def two_tensors(given):
    from torch.testing._internal.two_tensor import TwoTensor

    def run(wrap):
        x = TwoTensor(draw(4, 4), draw(4, 4, seed=1)).requires_grad_()
        y = wrap(lambda a: (a @ a.t()).sin().sum(0))(x)
        y.sum().backward()
        return [y.a, y.b, x.grad.a, x.grad.b]

    yield run(given.compiled), run(lambda f: f)


@feature(*EVERY)
def function_override(given):
    x = draw(4).as_subclass(Named)
    out = given.compiled(lambda a: a.sin() + 1, fullgraph=False)(x)
    yield out.as_subclass(torch.Tensor), draw(4).sin() + 1
    yield type(out).__name__, "Named"


@feature()
def jagged(given):
    def nested():
        return torch.nested.nested_tensor(
            [draw(2, 4), draw(3, 4, seed=1)], layout=torch.jagged, requires_grad=True
        )

    def run(wrap):
        x = nested()
        y = wrap(lambda a: a.sin() * 2)(x)
        y.values().sum().backward()
        return [y.values(), x.grad.values()]

    yield run(lambda f: given.compiled(f, fullgraph=False)), run(lambda f: f)
