"""``Optimizer.step``, ``zero_grad`` and schedulers' steps in a graph that holds the backward.

Torch breaks the graph twice in each step, so that a graph of an update alone computes in place, and
keeps Dynamo from ``zero_grad`` and from fused updates. A graph with the backward in it has no
gradients to give, so that its update is in place as well. What ``step`` does around the update,
such as its hooks, is traced from torch's own code.

An optimizer's states are made before the first call of such a graph. Otherwise that call would make
them, and the second call would need another graph.

A scheduler computes with numbers of the program, which would be constants of the graph, and torch
skips all of its file. Its step is called when the graph has run, with what it was given. The graph
ends before the program reads a rate that the step changes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from dynamo_dist.torch_compat import (
    dynamo_building,
    dynamo_calls,
    dynamo_modules,
    dynamo_optimizers,
)
from dynamo_dist.torch_compat.patching import Patch

# --- In the graph ---------------------------------------------------------------------------------


def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """In the graph: ``Optimizer.zero_grad``, gradient by gradient."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                if set_to_none:
                    parameter.grad = None
                else:
                    parameter.grad.zero_()


def last_rates(scheduler: Any) -> list[Any]:
    """In the graph: ``scheduler.get_last_lr()``."""
    found: list[Any] = scheduler._last_lr
    return found


class _Later:
    """Steps a scheduler when its attribute is set, which compiled code does after the graph."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = ref(scheduler)

    @property
    def calls(self) -> list[tuple[Any, ...]]:
        """The arguments of each step."""
        return []

    @calls.setter
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def calls(self, calls: list[tuple[Any, ...]]) -> None:
        if (scheduler := self._scheduler()) is not None:
            for arguments in calls:
                scheduler.step(*arguments)


_later: WeakKeyDictionary[Any, _Later] = WeakKeyDictionary()


# --- While tracing --------------------------------------------------------------------------------


def _in_whole_step(tx: Any) -> bool:
    return dynamo_calls.is_our_backend(tx) and dynamo_calls.holds_backward(tx)


def _is_known_whole_step(tx: Any) -> bool:
    is_known = dynamo_calls.holds_backward(tx) or dynamo_calls.computes_gradients(tx)
    return dynamo_calls.is_our_backend(tx) and is_known


def _zero_grad(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``optimizer.zero_grad()``; None leaves it to upstream, which runs it outside of graphs."""
    if not dynamo_calls.is_our_backend(tx):
        return None
    with _reading_no_rate(tx, dynamo_building.python_object(args[0])):
        return dynamo_building.call_traced(tx, zero_grad, args, kwargs)


def _after_update(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """What torch calls after an update, for its profiler; upstream traces it."""
    dynamo_optimizers.read_numbers_again(tx)


def _deferred(tx: Any) -> dict[int, tuple[Any, list[Any]]]:
    """The schedulers that are stepped after the graph, by id, with the arguments of each step."""
    found: dict[int, Any] = dynamo_calls.trace_state(tx, dict, "_dynamo_dist_schedulers")
    return found


def _step(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``scheduler.step(...)``; None leaves it to upstream, which breaks the graph."""
    if kwargs or not dynamo_calls.is_our_backend(tx) or not dynamo_calls.holds_backward(tx):
        return None
    tracker, *given = args
    scheduler = dynamo_building.python_object(tracker)
    later = _later.setdefault(scheduler, _Later(scheduler))
    _, calls = _deferred(tx).setdefault(id(scheduler), (scheduler, []))
    calls.append(dynamo_modules.build_tuple(tx, given))
    dynamo_building.set_after_graph(
        tx,
        dynamo_building.build_by_weakref(tx, later),
        "calls",
        dynamo_building.build_list(tx, [*calls]),
    )
    dynamo_optimizers.outdate_rates(tx, scheduler.optimizer, _refuse)
    return dynamo_building.build(tx, None)


def _last_rates(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``scheduler.get_last_lr()``; None leaves it to upstream, which breaks the graph."""
    if not dynamo_calls.is_our_backend(tx):
        return None
    if id(dynamo_building.python_object(args[0])) in _deferred(tx):
        _refuse()
    return dynamo_building.call_traced(tx, last_rates, args, kwargs)


def _refuse() -> None:
    dynamo_building.graph_break(
        "learning rate read after scheduler.step() in one graph",
        "LRScheduler.step",
        "The scheduler steps when the graph has run, and the graph would read the rate from before "
        "the step.",
        "Read the rate before scheduler.step(), or outside of the compiled function.",
    )


@contextlib.contextmanager
def _reading_no_rate(tx: Any, optimizer: Optimizer) -> Iterator[None]:
    """Look at an optimizer's groups and read no rate: Dynamo would read all that is in a group."""
    dynamo_optimizers.restore_rates(tx, optimizer)
    yield
    if _is_outdated(tx, optimizer):
        dynamo_optimizers.outdate_rates(tx, optimizer, _refuse)


def _refuse_outdated(tx: Any, optimizer: Optimizer) -> None:
    """Break the graph before a step of an optimizer whose scheduler has stepped in the graph."""
    if _is_outdated(tx, optimizer):
        _refuse()


def _is_outdated(tx: Any, optimizer: Optimizer) -> bool:
    return any(scheduler.optimizer is optimizer for scheduler, _ in _deferred(tx).values())


def answers() -> dict[object, Callable[..., Any]]:
    """Answers to calls of methods of optimizers and of torch's schedulers, by function."""
    classes = [each for each in vars(lr_scheduler).values() if inspect.isclass(each)]
    return {
        Optimizer.zero_grad: _zero_grad,
        Optimizer._optimizer_step_code: _after_update,
        LRScheduler.get_last_lr: _last_rates,
        **{each.step: _step for each in classes if issubclass(each, LRScheduler)},
    }


def patches() -> list[Patch]:
    """List the patches that enabling makes for optimizers."""
    return [
        *dynamo_optimizers.on_updates(_in_whole_step),
        *dynamo_optimizers.on_fused_updates(_in_whole_step),
        *dynamo_optimizers.on_scheduled_steps(dynamo_calls.is_our_backend, _refuse_outdated),
        *dynamo_optimizers.learning_rates_are_inputs(_is_known_whole_step),
        *dynamo_optimizers.on_gradients_in_graph(),
    ]
