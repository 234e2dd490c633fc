"""``backward()``, ``torch.autograd.grad`` and backward hooks inside a compiled function.

A setting has torch trace ``backward()``, as gradients that the graph computes and accumulates. In
what names our backend it is traced so, and a training step is one graph. That omits what else
eager's engine does: such a graph is guarded to have no gradient hooks on its inputs. Hooks after
the accumulation, such as optimizers in backward, are traced after the backward: eager mode calls
each as soon as its gradient is there. DDP and FSDP2, which reduce through hooks, are traced with
reductions of their own.

Upstream traces backward hooks under compiled autograd only. Here each hook is traced as a function
of gradients, and the graph registers what was traced where eager registers the hook; AOTAutograd
runs it when it makes the backward graph. A hook that does more than compute, such as one that
appends to a list, cannot be traced so and breaks with a fix.

Torch can trace ``torch.autograd.grad`` and does not by default, so that the graph ends there; and a
gradient of that gradient, through a compiled backward, is an error. It is traced where DTensors
take part, and in all that names our backend.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.utils.hooks import BackwardHook

from dynamo_dist.torch_compat import (
    dynamo_building,
    dynamo_calls,
    dynamo_dtensors,
    dynamo_guards,
    dynamo_modules,
    dynamo_trackers,
)
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import attributes, ddp, fsdp2, unsharded_parameters


def _before_backward(tx: Any, tensor: Any) -> None:
    """Break the graph at the call, unless the program is compiled by our backend."""
    if not dynamo_calls.is_our_backend(tx):
        _refuse_backward(
            "The compiled forward brings its own backward graph, and eager's engine, with the "
            "hooks of parameters, runs outside of graphs.",
            f'or compile the whole step with backend="{dynamo_calls.BACKEND}".',
        )
    # Upstream sees no leaf then, and takes the call for nothing.
    if dynamo_calls.has_history_from_outside(tx, tensor):
        _refuse_backward("Its history began outside of the graph.")
    _guard(tx, [*dynamo_calls.tensor_inputs(tx)], _refuse_backward, fsdp2.keeps_whole)
    # Wrappers read their parameters in one way for gradients of this graph, and in another for a
    # backward graph.
    if unsharded_parameters.reads(tx).entered:
        dynamo_calls.expect_gradients(tx)
        if dynamo_calls.rules_out_gradients(tx):
            _refuse_backward(
                "FSDP2 keeps its gradients unreduced beyond the graph.",
                "or compile all micro-batches up to the one that reduces as one function.",
            )
        if ddp.is_any_used_alone(tx):
            _refuse_backward("A parameter of DDP is used beside its forward.")
        taken = ddp.take_accumulated(tx, tensor), unsharded_parameters.take_kept_whole(tx, tensor)
        _accumulated(tx).extend(itertools.chain(*taken))


def _accumulated(tx: Any) -> list[tuple[Any, Any]]:
    """What the backward that is traced adds to gradients, before wrappers reduce them."""
    found: list[tuple[Any, Any]] = dynamo_calls.trace_state(tx, list, "_dynamo_dist_accumulated")
    return found


def _after_backward(tx: Any, leaves: list[tuple[Any, torch.Tensor]]) -> None:
    if any(gradient.is_sparse for _, gradient in leaves):
        _refuse_backward("A parameter gets a sparse gradient, which no graph can hold.")
    if accumulated := _accumulated(tx):
        dynamo_modules.add_to_latest_gradients(tx, accumulated)
        accumulated.clear()
    unsharded_parameters.reshard(tx)
    # Backwards, as eager mode's engine goes, as far as the order of use is that of the leaves.
    for leaf, _ in reversed(leaves):
        hooks = [] if leaf is None else _hooks_after(dynamo_calls.real_tensor(tx, leaf))
        hooks = [each for each in hooks if not fsdp2.keeps_whole(each)]
        if hooks:
            trackers: list[Any] = [dynamo_building.build_by_weakref(tx, each) for each in hooks]
            given = [leaf, dynamo_building.build_list(tx, trackers)]
            dynamo_building.call_traced(tx, run_hooks, given, {})


def _refuse_backward(why: str, *more: str) -> NoReturn:
    fix = (
        "Return the loss and call backward outside, where it runs the compiled backward graph:",
        "    loss = compiled(x)",
        "    loss.backward()",
        *more,
    )
    dynamo_building.graph_break(
        "backward() inside a compiled function", "Tensor.backward", why, "\n".join(fix)
    )


_SIGNATURE = inspect.signature(torch.autograd.grad)


def _answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    try:
        given = _SIGNATURE.bind(*args, **kwargs).arguments
    except TypeError:
        return None  # upstream raises what eager raises
    wanted = [*dynamo_calls.tensors_among(given["inputs"])]
    # A program that set torch to trace it, or that compiles plain tensors for another backend,
    # keeps upstream's way.
    if dynamo_calls.is_asked_for() or not _is_ours(
        tx, [*wanted, *dynamo_calls.tensors_among(given["outputs"])]
    ):
        return None
    if unsharded_parameters.is_any_unsharded(tx):
        _refuse(
            "A parameter of FSDP2 or DDP is read in this graph with a backward that reduces, which "
            "eager's gradients do not go through."
        )
    _guard(tx, wanted, _refuse)
    try:
        return dynamo_calls.traced_gradients(tx, args, kwargs)
    except dynamo_calls.CannotTrace as error:
        _refuse(f"It raises an error on what the graph knows: {' '.join(str(error).split())[:300]}")


def _is_ours(tx: Any, tensors: list[Any]) -> bool:
    return dynamo_calls.is_our_backend(tx) or any(map(dynamo_calls.is_dtensor, tensors))


def _guard(
    tx: Any,
    wanted: list[Any],
    refuse: Callable[[str], NoReturn],
    keeps: Callable[[object], bool] = lambda hook: False,
) -> None:
    """Guard what of its inputs a graph does not see, and eager's engine does. ``keeps(hook)``: the
    graph does itself what this one is for.
    """
    asked = {id(each) for each in wanted}
    for tracker in dynamo_calls.tensor_inputs(tx):
        # Without gradients there is no history that eager's engine could see.
        if not tracker.requires_grad:
            continue
        try:
            tensor = dynamo_calls.real_tensor(tx, tracker)
        except Exception:
            refuse("An input of the graph cannot be looked at while tracing.")
        own = any(fsdp2.is_own_hook(each) and not keeps(each) for each in _hooks_after(tensor))
        if id(tracker) in asked and (tensor._backward_hooks or own):
            refuse(
                "A hook stands on a tensor whose gradient is asked for; a graph would not run it."
            )
        # A tensor that is a leaf in one call may be a result in the next, and its gradient then
        # goes further back.
        dynamo_guards.guard(tracker, dynamo_guards.value_guard("history", _history))


def _history(tensor: torch.Tensor) -> tuple[bool | int, ...]:
    hooks = _hooks_after(tensor)
    return tensor.grad_fn is None, bool(tensor._backward_hooks), *map(id, hooks)


def _hooks_after(tensor: torch.Tensor) -> list[Any]:
    """The hooks that eager mode calls when a gradient is accumulated."""
    return list((tensor._post_accumulate_grad_hooks or {}).values())


def _refuse(why: str) -> NoReturn:
    dynamo_building.graph_break(
        "torch.autograd.grad inside a compiled function",
        "torch.autograd.grad",
        why,
        "Compile what computes the outputs, and call torch.autograd.grad outside.",
    )


FIX = (
    "torch._dynamo.config.compiled_autograd = True  # before the first call: hooks run as they "
    "are\n"
    "    # or hook the tensor instead of the module: y = self.inner(x); y.register_hook(hook)"
)


# --- In the graph ---------------------------------------------------------------------------------


def run_hooks(leaf: torch.Tensor, hooks: list[Callable[[torch.Tensor], None]]) -> None:
    """In the graph: what is called when a leaf's gradient is accumulated."""
    with torch.no_grad():
        for hook in hooks:
            hook(leaf)


def new_hooks() -> BackwardHook:
    """In the graph: torch's hooks of one module call, with no hooks yet."""
    return BackwardHook(None, [], [])


def through_input(hooks: BackwardHook, size: int, at: tuple[int, ...], *tensors: Any) -> Any:
    """In the graph: the tensors among a module's ``size`` arguments, those at ``at``, hooked."""
    return _through(hooks.setup_input_hook, size, at, tensors)


def through_output(hooks: BackwardHook, size: int, at: tuple[int, ...], *tensors: Any) -> Any:
    """In the graph: the tensors among a module's ``size`` results, those at ``at``, hooked."""
    return _through(hooks.setup_output_hook, size, at, tensors)


def _through(
    setup: Callable[[Any], Any], size: int, at: tuple[int, ...], tensors: tuple[Any, ...]
) -> Any:
    # The hook counts all arguments of the module; those that are no tensors do not enter the graph.
    args: list[Any] = [None] * size
    for position, tensor in zip(at, tensors, strict=True):
        args[position] = tensor
    hooked = setup(tuple(args))
    return tuple(hooked[position] for position in at)


def with_hook(
    hooks: BackwardHook,
    is_pre: bool,
    taken: tuple[tuple[bool, ...], ...],
    given: tuple[int | None, ...],
    body: Callable[..., Any],
    *free: Any,
) -> BackwardHook:
    """In the graph: the same hooks and one more, which computes ``body``.

    ``taken`` says for each of the hook's tuples of gradients which it reads, and ``given`` which
    result of ``body`` stands at each place of the tuple that the hook returns, if it returns one.
    """

    def hook(module: None, *gradients: tuple[Any, ...]) -> Any:
        flat = [
            grad
            for grads, reads in zip(gradients, taken, strict=True)
            for grad, is_read in zip(grads, reads, strict=True)
            if is_read
        ]
        results = body(*flat, *free)
        # An empty tuple means that the hook returns nothing: the gradients stay as they are.
        return tuple(None if at is None else results[at] for at in given) or None

    (hooks.user_pre_hooks if is_pre else hooks.user_hooks).append(hook)
    return hooks


# --- While tracing --------------------------------------------------------------------------------


def replaced(args: Any, at: tuple[int, ...], tensors: Any) -> Any:
    """Traced: a tuple with the items at ``at`` replaced."""
    items = list(args)
    for position, tensor in zip(at, tensors, strict=True):
        items[position] = tensor
    return tuple(items) if type(args) is tuple else type(args)(*items)


class ModuleHooksVariable(dynamo_calls.ObjectTracker):
    """The hooks of one call of a module: an object of the graph that is passed from node to
    node.
    """

    def __init__(self, module: Any, hooks: Any, pre_hooks: Any, proxy: Any) -> None:
        super().__init__()
        self.module, self.user_hooks, self.user_pre_hooks = module, hooks, pre_hooks
        self.proxy = proxy
        self.inputs: list[Any] = []

    def as_proxy(self) -> Any:
        return self.proxy

    def traced_type(self) -> type:
        return BackwardHook

    def attribute(self, tx: Any, name: str) -> Any:
        return attributes.bound_method(self, tx, name)

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        (value,) = args
        if name == "setup_input_hook":
            self.inputs = dynamo_building.items_of(tx, value)
            return self._pass(tx, through_input, value, self.inputs)
        # Torch wraps a single result for its hooks and unwraps it again; here it is the same.
        is_tuple = issubclass(value.python_type(), tuple)
        outputs = (
            dynamo_building.items_of(tx, value) if is_tuple else [dynamo_building.realized(value)]
        )
        if not is_tuple:
            value = dynamo_modules.build_tuple(tx, outputs)
        # Before the results pass through: the hooks have to be registered when the node of the
        # outputs is made.
        self._trace_hooks(tx, outputs)
        result = self._pass(tx, through_output, value, outputs)
        return result if is_tuple else dynamo_building.items_of(tx, result)[0]

    def _pass(self, tx: Any, through: Any, value: Any, items: list[Any]) -> Any:
        """The value with its tensors passed through a node of the graph."""
        at = tuple(i for i, item in enumerate(items) if dynamo_modules.is_tensor(item))
        if not any(dynamo_modules.is_tensor_with_gradient(items[i]) for i in at):
            return value
        tensors = dynamo_modules.node_of_tensors(
            tx, through, (self.proxy, len(items), at, *[items[i].as_proxy() for i in at])
        )
        return dynamo_building.call_traced(
            tx, replaced, [value, dynamo_building.build(tx, at), tensors], {}
        )

    def _trace_hooks(self, tx: Any, outputs: list[Any]) -> None:
        if not any(map(dynamo_modules.is_tensor_with_gradient, outputs)):
            return
        grad_outputs = [_gradient(tx, each) for each in outputs]
        grad_inputs = [_gradient(tx, each) for each in self.inputs]
        for hook in dynamo_building.items_of(tx, self.user_pre_hooks):
            self._trace(tx, hook, True, [grad_outputs])
        for hook in dynamo_building.items_of(tx, self.user_hooks):
            self._trace(tx, hook, False, [grad_inputs, grad_outputs])

    def _trace(self, tx: Any, hook: Any, is_pre: bool, gradients: list[list[Any]]) -> None:
        taken = tuple(tuple(grad is not None for grad in grads) for grads in gradients)
        given: list[int | None] = []

        def call(*flat: Any) -> Any:
            rest = iter(flat)
            tuples = [
                dynamo_modules.build_tuple(
                    tx, [next(rest) if is_read else _none(tx) for is_read in reads]
                )
                for reads in taken
            ]
            result = dynamo_building.realized(hook.call_function(tx, [self.module, *tuples], {}))
            # Dynamo may speculate more than once; the last trace is the one that counts.
            given.clear()
            tensors: list[Any] = []
            if not result.is_constant_none():
                for item in dynamo_building.items_of(tx, result):
                    is_tensor = dynamo_modules.is_tensor(item)
                    given.append(len(tensors) if is_tensor else None)
                    tensors += [item] if is_tensor else []
            return dynamo_modules.build_tuple(tx, tensors)

        flat = [grad for grads in gradients for grad in grads if grad is not None]
        graph, free = dynamo_modules.traced_apart(tx, call, flat, _BREAK, _WHY, FIX)
        # A hook that only looks leaves nothing to run in the backward graph.
        if not given and dynamo_modules.computes_nothing(graph):
            return
        body = dynamo_modules.graph_as_argument(tx, graph)
        self.proxy = dynamo_modules.node_of_constant(
            tx, with_hook, (self.proxy, is_pre, taken, tuple(given), body, *free)
        )


_BREAK = "Module backward hook that is no plain computation"
_WHY = (
    "The backward graph is compiled once, so a backward hook may compute new gradients from those "
    "it is given and do nothing else."
)


def _none(tx: Any) -> Any:
    return dynamo_building.build(tx, None)


def _gradient(tx: Any, of: Any) -> Any:
    """A tensor like the gradient of a traced one, as an example for hooks; None where there will
    be none.
    """
    has_gradient = dynamo_modules.is_tensor_with_gradient(of)
    return dynamo_building.call_traced(tx, torch.Tensor.detach, [of], {}) if has_gradient else None


def create(tx: Any, module: Any, user_hooks: Any, user_pre_hooks: Any) -> ModuleHooksVariable:
    """``BackwardHook(module, hooks, pre_hooks)`` while tracing, without compiled autograd."""
    proxy = dynamo_modules.node_of_constant(tx, new_hooks, ())
    return ModuleHooksVariable(module, user_hooks, user_pre_hooks, proxy)


def patches() -> list[Patch]:
    """List the patches that enabling makes for ``backward()``, module hooks and
    ``torch.autograd.grad``; under compiled autograd module hooks stay upstream's.
    """
    return [
        *dynamo_modules.on_backward(
            _before_backward, _after_backward, dynamo_calls.expect_no_gradients
        ),
        *dynamo_dtensors.on_tensor_attributes(lambda *_: None, dynamo_modules.value_without_source),
        *dynamo_modules.on_module_backward_hooks(create),
        *dynamo_trackers.on_function(torch.autograd.grad, _answer),
        *dynamo_calls.see_histories_of_subclasses(),
    ]
