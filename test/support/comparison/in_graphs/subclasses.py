"""Tensor subclasses that rows use: one that a DTensor holds, and one of DTensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import return_and_correct_aliasing

aten = torch.ops.aten


class Halved(torch.Tensor):
    """Keep floats as half as many bytes; every operator computes on the whole."""

    @staticmethod
    def __new__(cls, kept):
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, kept.shape, strides=kept.stride(), dtype=torch.float32, device=kept.device
        )

    def __init__(self, kept):
        self.kept = kept

    @staticmethod
    def of(whole):
        return Halved(whole.to(torch.bfloat16))

    def whole(self):
        return self.kept.float()

    def __repr__(self, *, tensor_contents=None):
        return f"Halved({self.kept})"

    def __tensor_flatten__(self):
        return ["kept"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Halved(inner["kept"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is aten.copy_.default and isinstance(args[0], Halved):
            source = args[1].whole() if isinstance(args[1], Halved) else args[1]
            args[0].kept.copy_(source)
            return args[0]
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            found = Halved(func(args[0].kept, **kwargs))
            return return_and_correct_aliasing(func, args, kwargs, found)
        args = torch.utils._pytree.tree_map_only(Halved, Halved.whole, args)
        return func(*args, **kwargs)


class NamedDTensor(DTensor):
    """A DTensor under a name of its own."""
