"""Gradients that a compiled backward returns, and the nodes that add them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat.aot.wrapping import Wrap
from dynamo_dist.torch_compat.changes import Change, SetAttribute, WrapAttribute, has
from dynamo_dist.torch_compat.probing import _optional_module

_AccumulateGrad: Any = getattr(torch._C._functions, "AccumulateGrad", None)
_hook_owner: Any = getattr(torch.autograd.function, "_HookMixin", None)
# Inside it, attributes of a DTensor are read as fast as a tensor's: it has no ``__torch_function__`` to ask.
plain_attributes: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass


class WrappedGradient(NamedTuple):
    """A gradient that is a DTensor: its place among the inputs, those of its parts among the outputs."""

    position: int
    local: int
    mesh: int
    meta: Any

    def unflatten(self, local: torch.Tensor, mesh: Any) -> DTensor:
        """The DTensor, as stock makes it."""
        inner = {"_local_tensor": local, "device_mesh": mesh}
        size, stride = torch.Size(self.meta.outer_size), tuple(self.meta.outer_stride)
        return DTensor.__tensor_unflatten__(inner, self.meta.meta, size, stride)


class GradientLayout(NamedTuple):
    """Targets of a backward graph's outputs: number of ``inputs``, those that get a tensor as it is, and DTensors."""

    inputs: int
    plain: tuple[tuple[int, int], ...]
    wrapped: tuple[WrappedGradient, ...]


def wrap_gradients(make: Callable[[Wrap, GradientLayout], Wrap]) -> list[Change]:
    """``make(stock, layout)`` stands for the function that turns a backward's outputs into gradients.

    Empty where this torch has no such function, or lacks what ``make`` needs to tell that nobody looks
    at a gradient. ``codegen_backward_subclass_fns`` was seen in 2.13 to 2.15.
    """
    owner = _optional_module("torch._functorch._aot_autograd.subclass_codegen")
    nodes = "_current_autograd_node", "_will_engine_execute_node"
    off = "gradients of DTensors are wrapped and added one by one, which takes longer"
    if not (
        has(owner, "codegen_backward_subclass_fns", off=off)
        and has(torch._C, *nodes, off=off)
        and has(torch._C._functions, "AccumulateGrad", off=off)
        and has(_hook_owner, "_register_hook", off=off)
    ):
        return []

    def wrapped(stock: Any) -> Any:
        def build(grad_input_metas: Any = None) -> Any:
            unwrap, wrap = stock(grad_input_metas)
            layout = None if wrap is None else _layout(grad_input_metas)
            return unwrap, wrap if layout is None else make(wrap, layout)

        return build

    return [
        WrapAttribute(owner, "codegen_backward_subclass_fns", wrapped),
        SetAttribute(_hook_owner, "_register_hook", staticmethod(_register_or_tell)),
    ]


def _layout(metas: Sequence[Any]) -> GradientLayout | None:
    """None unless every gradient is a tensor or a DTensor of known size."""
    plain, wrapped, at = [], [], 0
    for position, meta in enumerate(metas):
        attrs = getattr(meta, "attrs", None)
        if attrs is None:
            plain.append((position, meta.unwrapped_idx))
            at = max(at, meta.unwrapped_idx + 1)
            continue
        sizes = (*meta.outer_size, *meta.outer_stride)
        if (
            meta.original_subclass_type is not DTensor
            or list(attrs) != ["_local_tensor", "device_mesh"]
            or any(hasattr(attr, "attrs") for attr in attrs.values())
            or not all(type(size) is int and size >= 0 for size in sizes)
        ):
            return None
        wrapped.append(WrappedGradient(position, at, at + 1, meta))
        at += 2
    return GradientLayout(len(metas), tuple(plain), tuple(wrapped)) if wrapped else None


def current_node() -> Any:
    """The autograd node that runs in this thread; None outside backward, or while disabled."""
    if _hook_owner._register_hook is not _register_or_tell:
        return None
    return torch._C._current_autograd_node()


def current_backward() -> int:
    """Autograd's number of the backward that runs in this thread; -1 outside of one."""
    return torch._C._current_graph_task_id()


def call_after_backward(call: Callable[[], None]) -> None:
    """Call once the backward that runs now is through, before ``backward()`` returns."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def leaves_of(targets: Sequence[Any]) -> list[Any]:
    """The DTensor for which each autograd node accumulates; None if it is no such node or hooks are on it."""
    leaves: list[Any] = []
    for target in targets:
        leaf = target.variable if type(target) is _AccumulateGrad else None
        plain = (
            type(leaf) is DTensor
            and not leaf._backward_hooks
            and not leaf._post_accumulate_grad_hooks
        )
        leaves.append(leaf if plain else None)
    return leaves


_variable = operator.attrgetter("variable")
_tensor_hooks = operator.attrgetter("_backward_hooks")
_after_hooks = operator.attrgetter("_post_accumulate_grad_hooks")
spec_of = operator.attrgetter("_spec")
local_of = operator.attrgetter("_local_tensor")


def all_leaves_of(targets: Sequence[Any]) -> list[Any] | None:
    """``leaves_of`` without a Python frame or line for each; None if it would give a None."""
    if set(map(type, targets)) != {_AccumulateGrad}:
        return None
    leaves = list(map(_variable, targets))
    if set(map(type, leaves)) != {DTensor}:
        return None
    hooked = any(map(_tensor_hooks, leaves)) or any(map(_after_hooks, leaves))
    return None if hooked else leaves


def all_will_run(nodes: Sequence[Any]) -> bool:
    """``will_run`` of every node."""
    try:
        return all(map(torch._C._will_engine_execute_node, nodes))
    except RuntimeError:
        return False


def will_run(node: Any) -> bool:
    """Return whether this backward runs the accumulator, and not ``torch.autograd.grad`` for its input."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False


class _Told(Exception):
    pass


_ASK = object()
_stock_register_hook: Any = getattr(_hook_owner, "_register_hook", None)


def _register_or_tell(hooks: Any, hook: Any) -> Any:
    """Stock's way to add ``hook`` to those of a node, or to tell which there are."""
    if hook is _ASK:
        raise _Told(bool(hooks))
    return _stock_register_hook(hooks, hook)


def has_hooks(node: Any) -> bool:
    """Return whether hooks from Python are on an autograd node, which does not say; nothing is registered."""
    for register in (node.register_hook, node.register_prehook):
        try:
            register(_ASK)
        except _Told as told:
            if told.args[0]:
                return True
    return False
