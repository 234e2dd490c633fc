"""Gradients that are to be differentiated again, through compiled graphs on DTensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat.changes import Change, WrapAttribute


def on_double_backward(refuse: Callable[[], None]) -> list[Change]:
    """Call ``refuse()`` when a compiled backward that returns DTensors runs with ``create_graph=True``.

    Torch wraps those results behind autograd's back: a second gradient goes not further, and what was to come from
    there is missing, silently where other terms have one. Of plain tensors torch raises an error itself.

    The check is part of the backward of such a graph, so autograd does nothing more anywhere else.
    ``RuntimeWrapper.post_compile`` gets the graph's ``autograd.Function.apply``, from a cache too. Seen in 2.13 to 2.15.
    """

    def checked(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def post_compile(self: Any, compiled_fn: Any, *args: Any, **kwargs: Any) -> Any:
            function = getattr(compiled_fn, "__self__", None)
            if isinstance(function, type) and _returns_dtensors(function):
                function.backward = _checking(function.backward, refuse)  # type: ignore[attr-defined]
            return stock(self, compiled_fn, *args, **kwargs)

        return post_compile

    return [WrapAttribute(RuntimeWrapper, "post_compile", checked)]


def _returns_dtensors(function: type) -> bool:
    """Return whether the backward of a compiled graph makes DTensors of what it computes."""
    made = getattr(function, "maybe_subclass_metadata", None)
    metas = getattr(made, "grad_input_metas", None) or ()
    return any(
        isinstance(kind, type) and issubclass(kind, DTensor)
        for each in metas
        # The tensor that was traced with, or its type once the graph is ready to run.
        for kind in (
            getattr(each, "original_subclass_type", None),
            type(getattr(each, "original_subclass", None)),
        )
    )


def _checking(backward: Callable[..., Any], refuse: Callable[[], None]) -> staticmethod[..., Any]:
    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # The engine runs nodes so where it is to create a graph.
            refuse()
        return backward(ctx, *gradients)

    return staticmethod(run)
