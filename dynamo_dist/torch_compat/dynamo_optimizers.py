"""Dynamo's tracker of optimizers, and what torch keeps Dynamo from tracing of them.

Seen in 2.13 to 2.15.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
import torch._dynamo.config as _dynamo_config
import torch._dynamo.variables.builder as _builder
from torch import fx
from torch._dynamo.decorators import mark_static_address
from torch._dynamo.source import AttrSource, OptimizerSource, is_from_optimizer_source
from torch._dynamo.symbolic_convert import TensorifyState
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.functions import UserFunctionVariable
from torch._dynamo.variables.hashable import HashableTracker
from torch._dynamo.variables.lazy import LazyCache, LazyVariableTracker
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.optim import SGD, Adafactor, Adam, NAdam, Optimizer
from torch.optim import optimizer as _optimizer
from torch.utils._pytree import tree_leaves

from dynamo_dist.torch_compat import dynamo_building, dynamo_calls, dynamo_trackers
from dynamo_dist.torch_compat.patching import Patch

_STEP_WRAPPER = _optimizer._use_grad_for_differentiable(lambda self: None).__code__
_DISABLED = "_torchdynamo_orig_callable"  # of a function that Dynamo is kept from


def _enabled(function: Any) -> Any:
    """Return the function that torch wraps to keep Dynamo from it."""
    return getattr(function, _DISABLED, function)


def on_updates(in_whole_step: Callable[[Any], bool]) -> list[Patch]:
    """Trace updates as eager mode computes them, where ``in_whole_step(tx)``: without the graph
    breaks around them, and with powers of the number of steps in double precision.

    Torch breaks so that AOTAutograd sees a graph without gradients. It reads the number of steps,
    which eager mode reads as a number, as a tensor of float32: ``1 - 0.999**step`` is then off by
    1e-5 of itself in the first step. ``_get_value`` was seen in 2.13 to 2.14.
    """

    def break_(tx: Any, args: Any, kwargs: Any) -> Any:
        if tx.f_code is _STEP_WRAPPER and in_whole_step(tx):
            return dynamo_building.build(tx, None)
        return None

    def number(tx: Any, args: Any, kwargs: Any) -> Any:
        return _in_double(tx, args[0]) if args and in_whole_step(tx) else None

    def powers(tx: Any, args: Any, kwargs: Any) -> Any:
        exponents = dynamo_building.realized(args[1]) if len(args) == 2 else None
        if not isinstance(exponents, BaseListVariable) or not in_whole_step(tx):
            return None
        wide = [_in_double(tx, each) for each in exponents.items]
        if None in wide:
            return None
        power = dynamo_building.build(tx, torch._foreach_pow)
        return power.call_function(tx, [args[0], dynamo_building.build_list(tx, wide)], kwargs)

    return [
        *dynamo_trackers.on_function(torch._dynamo.graph_break, break_),
        *dynamo_trackers.on_function(_optimizer._get_value, number),
        *dynamo_trackers.on_function(torch._foreach_pow, powers),
    ]


def _in_double(tx: Any, tracker: Any) -> Any:
    """Return a number of float32 in double precision; None for any other value."""
    tracker = dynamo_building.realized(tracker)
    if not isinstance(tracker, TensorVariable):
        return None
    value = tracker.as_proxy().node.meta["example_value"]
    # Devices such as Apple's have no double.
    if value.ndim or value.dtype != torch.float32 or value.device.type not in ("cpu", "cuda"):
        return None
    return tracker.call_method(tx, "double", [], {})


def on_fused_updates(in_whole_step: Callable[[Any], bool]) -> list[Patch]:
    """Trace the for-loop in place of a fused update of ``torch.optim``, where
    ``in_whole_step(tx)``.

    Torch keeps Dynamo from fused updates: their operators have no fake kernels on the CPU. Inductor
    fuses the loop, which takes the same arguments and computes the same but for rounding.
    """

    def matches(value: Any) -> bool:
        # Torch wraps them as the first function is compiled: their ids are not known before.
        is_disabled = _DISABLED in vars(value) and value.__name__.startswith(_FUSED)
        return is_disabled and value.__module__.startswith("torch.optim.")

    def make(tx: Any, value: Any, source: Any) -> Any:
        if not in_whole_step(tx):
            return None
        loop = value.__name__.replace(_FUSED, _LOOP, 1)
        return dynamo_building.build(tx, _enabled(value).__globals__[loop])

    return dynamo_trackers.on_values(FunctionType, matches, make)


_FUSED, _LOOP = "_fused_", "_single_tensor_"


def on_scheduled_steps(
    is_ours: Callable[[Any], bool], before: Callable[[Any, Optimizer], None]
) -> list[Patch]:
    """Trace ``optimizer.step`` under the wrapper that a scheduler puts round it, where
    ``is_ours(tx)``, after ``before(tx, optimizer)``; upstream skips all of the file it is in.
    """

    def make(tx: Any, value: Any, source: Any) -> Any:
        if not is_ours(tx):
            return None
        inside = inspect.getclosurevars(value).nonlocals
        optimizer, step = inside["opt_ref"](), inside["func"]

        def call(*args: Any, **kwargs: Any) -> Any:
            before(tx, optimizer)
            # All that the wrapper does: schedulers ask for it once, before their first step.
            optimizer._opt_called = True
            tracker = dynamo_building.build_by_weakref(tx, optimizer)
            return dynamo_building.build(tx, step).call_function(tx, [tracker, *args], kwargs)

        return dynamo_building.build_callable(call)

    return dynamo_trackers.on_values(
        FunctionType, lambda value: "_wrapped_by_lr_sched" in vars(value), make
    )


def learning_rates_are_inputs(is_whole_step: Callable[[Any], bool]) -> list[Patch]:
    """Make an optimizer's learning rate an input of the graph, where ``is_whole_step(tx)``.

    Upstream makes it a constant, and a symbol once it has changed; but symbols that are no factor
    of a product become constants again, and each rate is another graph.
    """

    def make(tx: Any, value: float, source: Any) -> Any:
        if not _is_last_rate(source):
            if not is_whole_step(tx) or not _is_learning_rate(tx, source):
                return None
        elif not dynamo_calls.is_our_backend(tx):
            return None
        with _dynamo_config.patch(specialize_float=False, assume_static_by_default=False):
            return VariableBuilder(tx, source).wrap_symfloat(value)

    return dynamo_trackers.on_values(float, math.isfinite, make)


def _is_learning_rate(tx: Any, source: Any) -> bool:
    if not is_from_optimizer_source(source) or getattr(source, "index", None) != _RATE:
        return False
    while not isinstance(source, OptimizerSource):
        source = source.base
    # It compares the rate with a number that it reads from its steps, which no input allows.
    return not isinstance(tx.output.resolve_source_value(source), Adafactor)


def _is_last_rate(source: Any) -> bool:
    """Return whether a scheduler keeps the number as one that it has computed last."""
    return (
        isinstance(getattr(source, "base", None), AttrSource) and source.base.member == LAST_RATES
    )


_RATE = "lr"
LAST_RATES = "_last_lr"  # of a scheduler: one for each group


def _rate_as_tensor(tx: Any, group: Any) -> None:
    """Have the update read its group's learning rate as a tensor: with a number that changes, an
    operation of the graph is another one each time.
    """
    key = HashableTracker(ConstantVariable.create(_RATE))
    rate = dynamo_building.realized(group.items[key]) if key in group.items else None
    # It was read before the graph was known to be a whole step.
    if isinstance(rate, ConstantVariable) and _is_learning_rate(tx, rate.source):
        dynamo_calls.expect_gradients(tx)
    if not isinstance(rate, SymNodeVariable):
        return
    number = rate.as_proxy().node
    (given,) = number.args
    # Else torch traces the step anew, at the end of AOTAutograd's trace, for a number that no
    # operation of the graph takes.
    TensorifyState.specialize(str(rate.sym_num.node.expr))
    proxy = fx.Proxy(given, tx.output.root_tracer)
    group.items[key] = _builder.wrap_fx_proxy_cls(
        TensorVariable, tx=tx, proxy=proxy, example_value=given.meta["example_value"]
    )
    dynamo_calls.trace_state(tx, list, _NUMBERS).append((group.items, key, rate))


def _read_numbers_as_eager(optimizer: Optimizer, group: Any) -> None:
    """Have for-loops of Adam and NAdam compute as eager mode does.

    Dynamo calls each update capturable. Adam's for-loop then divides by the learning rate. At a
    rate of 0, with which a warm-up begins, parameters without a gradient become NaN: rows of an
    embedding whose words are not in the batch.
    """
    if not isinstance(optimizer, Adam | NAdam):
        return

    def given(name: str) -> Any:
        return group.items[HashableTracker(ConstantVariable.create(name))]

    foreach = given("foreach").as_python_constant()
    fused = isinstance(optimizer, Adam) and given("fused").as_python_constant()
    # On GPUs torch takes foreach, which divides by nothing that may be 0, unless told otherwise.
    is_loop = fused or foreach is False
    if is_loop or (foreach is None and optimizer.param_groups[0]["params"][0].device.type == "cpu"):
        key = HashableTracker(ConstantVariable.create("capturable"))
        group.items[key] = ConstantVariable.create(False)


_NUMBERS = "_dynamo_dist_rates"  # of a trace: what the update reads as tensors


def read_numbers_again(tx: Any) -> None:
    """Have the program read learning rates as the numbers that they are, after the update."""
    rates = dynamo_calls.trace_state(tx, list, _NUMBERS)
    while rates:
        items, key, rate = rates.pop()
        items[key] = rate


class OptimizerTracker(OptimizerVariable):
    """Traces ``Optimizer._init_group`` where the graph holds gradients; upstream refuses those.

    Upstream runs the real method, which sees no gradient that is still to be computed.
    """

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        is_ours = name == "_init_group" and dynamo_calls.is_our_backend(tx)
        if is_ours:
            _read_numbers_as_eager(self.value, dynamo_building.realized(args[0]))
        if not is_ours or not _has_gradients_in_graph(self.value, tx):
            return super().call_method(tx, name, args, kwargs)
        _rate_as_tensor(tx, dynamo_building.realized(args[0]))
        _make_states(self.value, tx)
        self.move_step_if_cpu()
        _mark_static(self.value)
        method = UserFunctionVariable(_init_group_of(self.value))
        return method.call_function(tx, [self, *args], kwargs)


def on_gradients_in_graph() -> list[Patch]:
    """Trace optimizers' updates where the graph holds gradients."""
    return dynamo_trackers.retrack_values(Optimizer, OptimizerTracker)


def _init_group_of(optimizer: Any) -> Any:
    return _enabled(type(optimizer)._init_group)


def _has_gradients_in_graph(optimizer: Optimizer, tx: Any) -> bool:
    effects = tx.output.side_effects
    found = (
        effects.id_to_variable.get(id(parameter))
        for group in optimizer.param_groups
        for parameter in group["params"]
    )
    return any(each is not None and effects.has_pending_mutation(each) for each in found)


def _make_states(optimizer: Optimizer, tx: Any) -> None:
    """Make what the first step would make, so that the second finds a graph that fits.

    States of optimizers by others are made in the graph: nothing is known of their arguments.
    """
    init_group = _init_group_of(optimizer)
    if not init_group.__module__.startswith("torch.optim."):
        return
    # The group, and a list for each kind of tensor.
    lists = len(inspect.signature(init_group).parameters) - 2
    for group in optimizer.param_groups:
        new = [p for p in group["params"] if p not in optimizer.state and _has_gradient(p, tx)]
        if new:
            _init_states(optimizer, init_group, {**group, "params": new}, lists)


def _init_states(optimizer: Optimizer, init_group: Any, group: dict[str, Any], lists: int) -> None:
    parameters = group["params"]
    saved = [parameter.grad for parameter in parameters]
    try:
        with torch.no_grad():
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
            init_group(optimizer, group, *([] for _ in range(lists)))
            # The first step of SGD takes the gradient for its momentum. With zeros the same comes
            # out, unless it dampens, which it does from the second step on.
            if isinstance(optimizer, SGD) and group["momentum"] and not group["dampening"]:
                for parameter in parameters:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    finally:
        for parameter, gradient in zip(parameters, saved, strict=True):
            parameter.grad = gradient


def _mark_static(optimizer: Optimizer) -> None:
    """Have CUDA graphs update states where they lie; a graph that writes to another input is none.

    Without a guard, unlike upstream: a CUDA graph compares addresses itself, and is recorded again
    after a state dict has been loaded.
    """
    for value in tree_leaves(list(optimizer.state.values())):
        if isinstance(value, torch.Tensor):
            mark_static_address(value, guard=False)


def _has_gradient(parameter: torch.Tensor, tx: Any) -> bool:
    variable = tx.output.side_effects.id_to_variable.get(id(parameter))
    if variable is None:
        return parameter.grad is not None
    # Called ``var_getattr`` up to 2.13.
    read = getattr(variable, "tp_getattro_impl", None) or variable.var_getattr
    gradient = dynamo_building.realized(read(tx, "grad"))
    return not gradient.is_constant_none()


class _Outdated(LazyCache):
    """A value that something after the graph will change: reading it breaks the graph."""

    def __init__(self, tracker: Any, refuse: Callable[[], None]) -> None:
        super().__init__(None, tracker.source)
        self.tracker, self.refuse = tracker, refuse

    def realize(self) -> None:
        self.refuse()


def outdate_rates(tx: Any, optimizer: Optimizer, refuse: Callable[[], None]) -> None:
    """Have the program read no learning rate of an optimizer from here on: ``refuse()`` breaks."""
    for items, key in _rates(tx, optimizer):
        if not _is_outdated(items[key]):
            items[key] = LazyVariableTracker(_Outdated(items[key], refuse))


def restore_rates(tx: Any, optimizer: Optimizer) -> None:
    """Undo ``outdate_rates``."""
    for items, key in _rates(tx, optimizer):
        if _is_outdated(items[key]):
            items[key] = items[key]._cache.tracker


def _is_outdated(rate: Any) -> bool:
    return isinstance(rate, LazyVariableTracker) and isinstance(rate._cache, _Outdated)


def _rates(tx: Any, optimizer: Optimizer) -> Iterator[tuple[Any, Any]]:
    key = HashableTracker(ConstantVariable.create(_RATE))
    for group in optimizer.param_groups:
        tracker = tx.output.side_effects.id_to_variable.get(id(group))
        if tracker is not None and key in tracker.items:
            yield tracker.items, key
