"""Context managers of DTensor while tracing: implicit replication, loss_parallel, CommDebugMode.

The context turns a switch of DTensor's dispatcher, by which plain tensors count as replicated.
Turned while tracing it must stand as it does in eager at each operation, for Dynamo, which runs the
operations on fake tensors, and for AOTAutograd, which runs Dynamo's graph: so each turn becomes a
call in that graph.

The context enters handlers into a table of DTensor's dispatcher. While tracing nothing may be
entered there, so the calls inside the context that the handlers are for become functions of ours,
which enter the handlers around their forward and, other than the context, around their backward:
AOTAutograd makes the backward graph at once, wherever the program will call ``backward()``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.fx
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

from dynamo_dist.torch_compat import (
    dtensor_strategies,
    dynamo_building,
    dynamo_dtensors,
    dynamo_trackers,
)
from dynamo_dist.torch_compat.patching import Patch

if TYPE_CHECKING:
    from dynamo_dist.torch_compat import InstructionTranslatorBase, VariableTracker


def refuse(
    tx: InstructionTranslatorBase, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> NoReturn:
    """Break the graph where the program makes the mode."""
    dynamo_building.graph_break(
        "CommDebugMode inside a compiled function",
        "CommDebugMode()",
        "It counts what runs inside it, and a graph runs later, without it.",
        'Count in eager mode, around the call: with torch.compiler.set_stance("force_eager"), '
        "CommDebugMode() as mode: compiled(x)",
    )


def debug_patches() -> list[Patch]:
    """List the patches that enabling makes for the mode."""
    return dynamo_trackers.on_construction(CommDebugMode, refuse)


@torch.fx.has_side_effect
def turn(on: bool) -> None:
    """In the graph: turn the switch. Nothing is left of it once AOTAutograd has run the graph."""
    dynamo_dtensors.set_implicit_replication(on)


@contextlib.contextmanager
def _context() -> Iterator[None]:
    """Stand in for the context while tracing."""
    try:
        turn(True)
        yield
    finally:
        turn(False)


def _enter(tx: object, args: list[object], kwargs: dict[str, object]) -> object:
    return dynamo_building.call_traced(tx, _context, args, kwargs)


def _turn(
    tx: InstructionTranslatorBase, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> object:
    dynamo_dtensors.restore_implicit_replication(tx)
    dynamo_dtensors.call_for_effect(tx, turn, args[0].as_python_constant())
    return dynamo_building.build(tx, None)


def implicit_replication_patches() -> list[Patch]:
    """List the patches that enabling makes for the context."""
    return [
        *dynamo_trackers.on_function(implicit_replication, _enter),
        *dynamo_trackers.on_function(turn, _turn),
        *dynamo_dtensors.keep_implicit_replication(),
    ]


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


def _run(function: Any, logits: torch.Tensor, args: Any, kwargs: Any) -> object:
    if logits.requires_grad and torch.is_grad_enabled():
        return _WithLossOps.apply(lambda x: function(x, *args, **kwargs), logits)
    with _loss_ops():
        return function(logits, *args, **kwargs)


def cross_entropy(input: torch.Tensor, *args: object, **kwargs: object) -> object:
    """In the graph: the loss of logits sharded over classes; parameters as those of torch's."""
    return _run(F.cross_entropy, input, args, kwargs)


def nll_loss(input: torch.Tensor, *args: object, **kwargs: object) -> object:
    """In the graph: the loss of logarithms of probabilities sharded over classes."""
    return _run(F.nll_loss, input, args, kwargs)


def log_softmax(input: torch.Tensor, *args: object, **kwargs: object) -> object:
    """In the graph: the logarithm of softmax over the sharded classes."""
    return _run(F.log_softmax, input, args, kwargs)


REPLACED: dict[object, Callable[..., object]] = {
    F.cross_entropy: cross_entropy,
    F.nll_loss: nll_loss,
    F.log_softmax: log_softmax,
}

_KEY = "loss_parallel"


def _set(inside: bool) -> Callable[..., object]:
    def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        dynamo_dtensors.dtensor_state(tx)[_KEY] = inside
        return dynamo_building.build(tx, None)

    return answer


def _inside(ours: Callable[..., Any]) -> Callable[..., object]:
    def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not dynamo_dtensors.dtensor_state(tx).get(_KEY):
            return None
        logits = args[0] if args else kwargs.get("input")
        if not dynamo_dtensors.is_tensor_of(logits, DTensor):
            return None
        return dynamo_dtensors.call_in_graph(tx, ours, args, kwargs)

    return answer


def loss_parallel_patches() -> list[Patch]:
    """List the patches that enabling makes for the context."""
    return [
        *dynamo_trackers.on_function(dtensor_strategies.enable_loss_ops, _set(True)),
        *dynamo_trackers.on_function(dtensor_strategies.disable_loss_ops, _set(False)),
        *(
            patch
            for function, ours in REPLACED.items()
            for patch in dynamo_trackers.on_function(function, _inside(ours))
        ),
    ]
