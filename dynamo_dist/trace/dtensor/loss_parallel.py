"""``with loss_parallel():`` inside a compiled function.

The context enters handlers into a table of DTensor's dispatcher. While tracing nothing may be entered
there, so the calls inside the context that the handlers are for become functions of ours, which enter
the handlers around their forward and, other than the context, around their backward: AOTAutograd makes
the backward graph at once, wherever the program will call ``backward()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat import (
    dtensor_strategies,
    dynamo_building,
    dynamo_dtensors,
    dynamo_trackers,
)
from dynamo_dist.torch_compat.patching import Change


@contextlib.contextmanager
def _loss_ops() -> Iterator[None]:
    """Have the handlers in the table; those of a context around the compiled function stay."""
    table = dtensor_strategies.dtensor_op_handlers()
    before = dict(table)
    dtensor_strategies.enable_loss_ops()
    try:
        yield
    finally:
        table.clear()
        table.update(before)


class _WithLossOps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[[Any], Any], logits: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad(), _loss_ops():
            ctx.logits = logits.detach().requires_grad_()
            ctx.loss = call(ctx.logits)
        return ctx.loss.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        with _loss_ops():
            (found,) = torch.autograd.grad(ctx.loss, ctx.logits, grad)
        del ctx.loss, ctx.logits
        return None, found


def _run(function: Any, logits: torch.Tensor, args: Any, kwargs: Any) -> Any:
    if logits.requires_grad and torch.is_grad_enabled():
        return _WithLossOps.apply(lambda x: function(x, *args, **kwargs), logits)
    with _loss_ops():
        return function(logits, *args, **kwargs)


def cross_entropy(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """In the graph: the loss of logits sharded over classes; parameters as those of torch's."""
    return _run(F.cross_entropy, input, args, kwargs)


def nll_loss(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """In the graph: the loss of logarithms of probabilities sharded over classes."""
    return _run(F.nll_loss, input, args, kwargs)


def log_softmax(input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """In the graph: the logarithm of softmax over the sharded classes."""
    return _run(F.log_softmax, input, args, kwargs)


REPLACED: dict[Any, Callable[..., Any]] = {
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    F.log_softmax: log_softmax,
}

_KEY = "loss_parallel"


def _set(inside: bool) -> Callable[..., Any]:
    def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        dynamo_dtensors.dtensor_state(tx)[_KEY] = inside
        return dynamo_building.build(tx, None)

    return answer


def _inside(ours: Callable[..., Any]) -> Callable[..., Any]:
    def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not dynamo_dtensors.dtensor_state(tx).get(_KEY):
            return None
        logits = args[0] if args else kwargs.get("input")
        if not dynamo_dtensors.is_tensor_of(logits, DTensor):
            return None
        return dynamo_dtensors.call_in_graph(tx, ours, args, kwargs)

    return answer


def loss_parallel_changes() -> list[Change]:
    """List the changes that enabling makes for the context."""
    return [
        *dynamo_trackers.on_function(dtensor_strategies.enable_loss_ops, _set(True)),
        *dynamo_trackers.on_function(dtensor_strategies.disable_loss_ops, _set(False)),
        *(
            change
            for function, ours in REPLACED.items()
            for change in dynamo_trackers.on_function(function, _inside(ours))
        ),
    ]
