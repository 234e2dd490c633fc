"""Gradients that are to be differentiated again, through compiled graphs on tensors that are made of others."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.autograd.graph as _autograd_graph

from dynamo_dist.torch_compat.changes import Change, WrapAttribute

# As torch calls the engine's entry, seen in 2.11 to 2.15.
_SIGNATURE = inspect.signature(
    lambda outputs, gradients, keep_graph, create_graph, inputs, *args, **kwargs: None
)
_CREATE_GRAPH = [*_SIGNATURE.parameters].index("create_graph")


def on_double_backward(refuse: Callable[[], None]) -> list[Change]:
    """Call ``refuse()`` before gradients with ``create_graph=True`` go through a compiled backward of that kind.

    Torch wraps the results of such a backward behind autograd's back: a second gradient goes not further, and what was
    to come from there is missing, silently where other terms have one. Of plain tensors torch raises an error itself.
    """

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def run(*args: Any, **kwargs: Any) -> Any:
            if len(args) <= _CREATE_GRAPH or args[_CREATE_GRAPH]:
                given = _SIGNATURE.bind(*args, **kwargs).arguments
                outputs, inputs = given["outputs"], given["inputs"]
                if given["create_graph"] and _goes_through_wrapped(outputs, inputs):
                    refuse()
            return stock(*args, **kwargs)

        return run

    return [
        WrapAttribute(module, "_engine_run_backward", changed)
        for module in (_autograd_graph, torch.autograd)
        if hasattr(module, "_engine_run_backward")
    ]


def _goes_through_wrapped(outputs: Iterable[Any], inputs: Iterable[Any]) -> bool:
    """Return whether a compiled backward that wraps its results lies between outputs and inputs; no inputs are all."""
    ends = {node for each in inputs if (node := _node(each)) is not None}
    order: list[Any] = []
    seen = set(ends)
    stack = [(node, False) for each in outputs if (node := _node(each)) is not None]
    while stack:  # children first
        node, is_left = stack.pop()
        if is_left:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(child, False) for child, _ in node.next_functions if child is not None]
    leading = set(ends)
    for node in order:
        if not ends or any(child in leading for child, _ in node.next_functions):
            leading.add(node)
            if getattr(getattr(node, "_forward_cls", None), "maybe_subclass_metadata", None):
                return True
    return False


def _node(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.autograd.graph.get_gradient_edge(value).node if value.requires_grad else None
    return getattr(value, "node", None)
