"""``torch.autograd.grad`` inside a compiled function: operations of its graph, with eager's numbers.

Torch can trace it and does not by default, so that the graph ends there; and a gradient of that gradient, through a
compiled backward, is an error. It is traced where DTensors take part, and in all that names our backend.
"""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

import torch

from dynamo_dist.torch_compat import (
    dynamo_building,
    dynamo_gradients,
    dynamo_guards,
    dynamo_trackers,
)
from dynamo_dist.torch_compat.patching import Change
from dynamo_dist.trace.modules import whole_parameters

BACKEND = "dynamo_dist"
_SIGNATURE = inspect.signature(torch.autograd.grad)


def _answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        given = _SIGNATURE.bind(*args, **kwargs).arguments
    except TypeError:
        return None  # stock raises what eager raises
    wanted = [*dynamo_gradients.tensors_among(given["inputs"])]
    if dynamo_gradients.is_asked_for() or not _is_ours(
        tx, [*wanted, *dynamo_gradients.tensors_among(given["outputs"])]
    ):
        return None
    if whole_parameters.is_any_whole(tx):
        _refuse(
            "A parameter of FSDP2 or DDP is read in this graph with a backward that reduces, which eager's "
            "gradients do not go through."
        )
    _guard(tx, wanted)
    try:
        return dynamo_gradients.traced_gradients(tx, args, kwargs)
    except dynamo_gradients.CannotTrace as error:
        _refuse(f"It raises an error on what the graph knows: {' '.join(str(error).split())[:300]}")


def _is_ours(tx: Any, tensors: list[Any]) -> bool:
    return dynamo_gradients.backend_name(tx) == BACKEND or any(
        map(dynamo_gradients.is_dtensor, tensors)
    )


def _guard(tx: Any, wanted: list[Any]) -> None:
    """Guard what of its inputs a graph does not see, and eager's engine does."""
    asked = {id(each) for each in wanted}
    for tracker in dynamo_gradients.tensor_inputs(tx):
        if not tracker.requires_grad:
            continue
        try:
            tensor = dynamo_gradients.real_tensor(tx, tracker)
        except Exception:
            _refuse("An input of the graph cannot be looked at while tracing.")
        if id(tracker) in asked and tensor._backward_hooks:
            _refuse(
                "A hook stands on a tensor whose gradient is asked for; a graph would not run it."
            )
        dynamo_guards.guard(tracker, dynamo_guards.value_guard("history", _history))


def _history(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.grad_fn is None, bool(tensor._backward_hooks)


def _refuse(why: str) -> NoReturn:
    dynamo_building.graph_break(
        "torch.autograd.grad inside a compiled function",
        "torch.autograd.grad",
        why,
        "Compile what computes the outputs, and call torch.autograd.grad outside.",
    )


def gradients_changes() -> list[Change]:
    """List the changes that enabling makes for ``torch.autograd.grad`` inside a compiled function."""
    return [
        *dynamo_trackers.on_function(torch.autograd.grad, _answer),
        *dynamo_gradients.see_histories_of_subclasses(),
    ]
