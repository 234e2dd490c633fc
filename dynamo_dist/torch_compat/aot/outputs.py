"""Outputs of a graph, their gradients and their symbolic sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch._aot_autograd.runtime_wrappers as _runtime_wrappers
import torch.fx.experimental.proxy_tensor as _proxy_tensor

from dynamo_dist.torch_compat.changes import Change, SetAttribute, WrapAttribute


def on_forward_with_tangents(
    cls: type, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> list[Change]:
    """Run ``wrap(forward)`` for each forward whose backward takes several gradients, one of them a ``cls``."""

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def post_compile(
            self: Any, compiled_fn: Any, *args: Any, runtime_metadata: Any, **kwargs: Any
        ) -> Any:
            tangents = runtime_metadata.subclass_tangent_meta or ()
            kinds = [getattr(meta, "original_subclass_type", None) for meta in tangents]
            if self.trace_joint and len(kinds) > 1 and cls in kinds:
                compiled_fn = wrap(compiled_fn)
            return stock(self, compiled_fn, *args, runtime_metadata=runtime_metadata, **kwargs)

        return post_compile

    return [WrapAttribute(_runtime_wrappers.RuntimeWrapper, "post_compile", changed)]


def on_plain_tangent(
    cls: type, answer: Callable[[torch.Tensor, Any], torch.Tensor | None]
) -> list[Change]:
    """A plain gradient where the backward was traced with a ``cls``: ``answer(gradient, metadata)`` in its place.

    ``metadata``: what ``__tensor_flatten__`` gave. On None stock refuses it.
    """
    owner = _runtime_wrappers.AOTDispatchAutograd
    stock = owner.process_runtime_tangent

    @functools.wraps(stock)
    def process_runtime_tangent(x: Any, meta: Any, *args: Any, **kwargs: Any) -> Any:
        if type(x) is torch.Tensor and getattr(meta, "original_subclass_type", None) is cls:
            found = answer(x, meta.meta)
            x = x if found is None else found
        return stock(x, meta, *args, **kwargs)

    return [SetAttribute(owner, "process_runtime_tangent", staticmethod(process_runtime_tangent))]


def keep_first_symbols() -> list[Change]:
    """While AOTAutograd makes a graph, a size that is known as an input stays known as that input.

    Stock lets any later value that simplifies to the same symbol take its place, such as the
    ``sym_max(s0, 1)`` by which DTensor computes strides, whose own argument is then looked up as itself,
    without end. Seen in torch 2.13 to 2.15.
    """
    stock = _proxy_tensor.set_proxy_slot

    @functools.wraps(stock)
    def set_proxy_slot(obj: Any, tracer: Any, proxy: Any) -> None:
        known = expression = None
        if isinstance(obj, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            expression = obj.node.expr
            known = tracer.sympy_expr_tracker.get(expression)
        stock(obj, tracer, proxy)
        if known is not None:
            tracer.sympy_expr_tracker[expression] = known

    return [SetAttribute(_proxy_tensor, "set_proxy_slot", set_proxy_slot)]
