"""Inputs of a graph whose collective may still run: tensors that wait when they are first read."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves

from dynamo_dist.torch_compat.changes import Change, SetAttribute, WrapAttribute, has
from dynamo_dist.torch_compat.probing import _optional_module


def write_to_pending_inputs() -> list[Change]:
    """Let in-place ops on a tensor in flight that enters a graph write to the tensor itself.

    AOTAutograd waits for such inputs before the graph; for those inside of DTensors from 2.14 on. In 2.13 the graph waits, and what that gives is another tensor, so that a write to it is lost.
    """
    if hasattr(_optional_module("torch._functorch._aot_autograd.schemas"), "ActInputPath"):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def dispatch(
            func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func._schema.is_mutable:
                for tensor in tree_leaves((args, kwargs)):
                    if not isinstance(tensor, AsyncCollectiveTensor) or tensor.completed:
                        continue
                    if isinstance(tensor.elem, FunctionalTensor):
                        tensor.elem.copy_(tensor.trigger_wait())
                    elif isinstance(tensor.elem, FakeTensor):
                        tensor.completed = True  # what the graph made of it is written back
            return stock(func, types, args, kwargs)

        return staticmethod(dispatch)

    return [WrapAttribute(AsyncCollectiveTensor, "__torch_dispatch__", changed)]


def pending_inputs_have_gradients() -> list[Change]:
    """Trace an input that waits when it is read with its gradient, where one is recorded.

    AOTAutograd puts the tensor inside in its place, which never has one: what eager mode recorded before is cut off,
    and the gradients behind it are silently missing. Seen in torch 2.13 to 2.15.
    """
    places = [
        _optional_module("torch._functorch._aot_autograd.frontend_utils"),
        _optional_module("torch._functorch.aot_autograd"),
    ]
    if not has(places[0], "process_inputs", off="inputs in flight lose their gradients"):
        return []
    stock: Any = getattr(places[0], "process_inputs")  # noqa: B009 - a module that may be missing

    @functools.wraps(stock)
    def process(flat_args: list[Any], *args: Any, **kwargs: Any) -> Any:
        before = list(flat_args)
        found = stock(flat_args, *args, **kwargs)
        if isinstance(found, tuple):
            for i, (given, traced) in enumerate(zip(before, found[0], strict=True)):
                if isinstance(given, AsyncCollectiveTensor) and given.requires_grad:
                    found[0][i] = _with_gradient(traced, given.is_leaf)
        return found

    return [
        SetAttribute(place, "process_inputs", process)
        for place in places
        if getattr(place, "process_inputs", None) is stock
    ]


def _with_gradient(traced: torch.Tensor, is_leaf: bool) -> torch.Tensor:
    if traced.requires_grad:
        return traced
    with torch.enable_grad():
        leaf = traced.detach().requires_grad_()
        return leaf if is_leaf else leaf.clone(memory_format=torch.preserve_format)
