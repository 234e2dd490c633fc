"""Inputs of a graph whose collective may still run: tensors that wait when they are first read."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from dynamo_dist.torch_compat.changes import Change, SetAttribute
from dynamo_dist.torch_compat.probing import _optional_module


def pending_inputs_have_gradients() -> list[Change]:
    """Trace an input that waits when it is read with its gradient, where one is recorded.

    AOTAutograd puts the tensor inside in its place, which never has one: what eager mode recorded before is cut off,
    and the gradients behind it are silently missing. Seen in torch 2.13 to 2.15.
    """
    places = [
        _optional_module("torch._functorch._aot_autograd.frontend_utils"),
        _optional_module("torch._functorch.aot_autograd"),
    ]
    stock = getattr(places[0], "process_inputs", None)
    if stock is None:
        return []

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
