"""``torch.autograd.grad`` in a traced program."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo.config as _dynamo_config
import torch._dynamo.variables.torch as _torch_variables
from torch._dynamo.exc import AutogradGradRestartAnalysis, TorchRuntimeError
from torch._dynamo.output_graph import OutputGraph, collect_reachable_grad_fns
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat.dynamo_building import fake_tensor, realized
from dynamo_dist.torch_compat.patching import Change, WrapAttribute

# What torch raises where a call is an error on what a graph knows of its arguments.
CannotTrace = TorchRuntimeError


def is_asked_for() -> bool:
    """Return whether the user told torch to trace gradients."""
    return bool(_dynamo_config.trace_autograd_ops)


def traced_gradients(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Trace the call as one of the graph, as torch does where it is told to; raises CannotTrace."""
    with _dynamo_config.patch(trace_autograd_ops=True):
        return TorchInGraphFunctionVariable(torch.autograd.grad).call_function(tx, args, kwargs)


def backend_name(tx: Any) -> str | None:
    """The name of the backend that a program is traced for."""
    return getattr(tx.output.compiler_fn, "_compiler_name", None)


def tensor_inputs(tx: Any) -> Iterator[Any]:
    """The trackers of the tensors that the graph takes so far."""
    for tracker in tx.output.input_source_to_var.values():
        if isinstance(tracker, TensorVariable) and tracker.source is not None:
            yield tracker


def real_tensor(tx: Any, tracker: Any) -> Any:
    """The tensor that an input stands for in the call that is traced; no guard is installed."""
    return tx.output.resolve_source_value(tracker.source)


def tensors_among(*trackers: Any) -> Iterator[Any]:
    """The trackers of tensors among arguments: tensors, or lists, tuples and dictionaries of some."""
    for tracker in map(realized, trackers):
        if isinstance(tracker, TensorVariable):
            yield tracker
        elif isinstance(tracker, ConstDictVariable):
            yield from tensors_among(*tracker.items.values())
        elif isinstance(tracker, BaseListVariable):
            yield from tensors_among(*tracker.items)


def is_dtensor(tracker: Any) -> bool:
    """Return whether a tensor's tracker stands for a DTensor."""
    return isinstance(fake_tensor(tracker), DTensor)


def see_histories_of_subclasses() -> list[Change]:
    """Find what autograd recorded of tensors that are made of others, where a gradient is traced.

    Torch looks at the inner tensors of a graph's inputs alone, which have no history, and at results only if they are
    plain. Seen in 2.13 to 2.15.
    """

    def collected(stock: Any) -> Any:
        @functools.wraps(stock)
        def collect(tensor: torch.Tensor) -> Any:
            own = (tensor.grad_fn, tensor._base.grad_fn if tensor._base is not None else None)
            return {*stock(tensor), *(each for each in own if each is not None)}

        return collect

    def validated(stock: Any) -> Any:
        @functools.wraps(stock)
        def validate(self: Any, results: list[Any], tx: Any) -> None:
            consumed = self.autograd_grad_consumed_grad_fns
            is_ours = [bool(consumed) and _has_gradient(each) for each in results]
            for mine, each in zip(is_ours, results, strict=True):
                if mine and collect_reachable_grad_fns([(fake_tensor(each), None)]) & consumed:
                    tx.speculation_log.autograd_grad_leaked_tensors.append(each.proxy.node.name)
                    tx.speculation_log.graph_break_on_autograd_grad = True
                    raise AutogradGradRestartAnalysis(restart_reason="dynamo_dist")
            stock(self, [each for mine, each in zip(is_ours, results, strict=True) if not mine], tx)

        return validate

    return [
        WrapAttribute(_torch_variables, "_collect_all_grad_fns", collected),
        WrapAttribute(OutputGraph, "_validate_outputs_safe_for_autograd_nodes", validated),
    ]


def _has_gradient(tracker: Any) -> bool:
    return isinstance(tracker, TensorVariable) and tracker.requires_grad and is_dtensor(tracker)
