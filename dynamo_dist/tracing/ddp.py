"""DDP in a compiled function: the averages of gradients are operations of its backward graph.

DDP's reducer averages buckets from hooks, while autograd runs. Here the parameters of a bucket pass
through one operator, whose backward averages, and the reducer sleeps in that call, as it does under
``no_sync()``. What the reducer would average besides is taken along: see
``dynamo_dist.tracing.ddp_average``. What cannot be exactly DDP's average breaks the graph, and DDP
runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import compress
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from dynamo_dist.torch_compat import (
    ddp,
    dynamo_building,
    dynamo_calls,
    dynamo_guards,
    dynamo_modules,
)
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import eager_fallback, unsharded_parameters
from dynamo_dist.tracing.ddp_average import Averaging, buckets
from dynamo_dist.tracing.unsharded_parameters import Place, Read


class _Averaged:
    """What Dynamo reads of one DDP module; the module itself would be guarded member by member."""

    def __init__(self, wrapper: DistributedDataParallel, module: nn.Module) -> None:
        self.wrapper = ref(wrapper)
        replicated = ddp.state_of_replicated(module)
        self._state = None if replicated is None else ref(replicated)
        found = [*ddp.averaged_parameters(wrapper, module)]
        params = ddp.parameters(wrapper)
        # Names and shapes, which all ranks have in common, make the same key on all of them.
        named = [(name, tuple(params[place].shape)) for place, _, name in found]
        ranks = dist.get_process_group_ranks(wrapper.process_group)
        key = eager_fallback.name(wrapper, "", named, ranks)
        registered = [(owner._parameters, name, place) for place, owner, name in found]
        wanted = [i for i, param in enumerate(params) if param.requires_grad]
        split = buckets([params[i] for i in wanted], ddp.bucket_capacities(wrapper))
        split = [[wanted[i] for i in bucket] for bucket in split]
        self.averaging = Averaging(key, params, registered, split)
        # As Dynamo reads them.
        self.leaves = self.averaging.leaves
        self.used = [leaf for _, leaf in self.averaging.used]
        self._hooks = unsharded_parameters.HookVersions(module.modules())

    def settings(self) -> tuple[Any, ...]:
        """What a program may change between calls, as far as a graph depends on it."""
        wrapper = self.wrapper()
        # The module is gone; the guard fails, and the function is compiled for whatever took its
        # place.
        if wrapper is None:
            return ()
        self.follow(wrapper)
        return (
            ddp.averaging_settings(wrapper),
            self.averaging.refresh(),
            self._hooks.version(),
            unsharded_parameters.is_broken(wrapper, ddp.synchronizes(wrapper)),
        )

    def follow(self, wrapper: DistributedDataParallel) -> None:
        """Do first what ``replicate`` does in each forward."""
        state = None if self._state is None else self._state()
        # ``replicate`` keeps ``no_sync`` in its own state and hands it to its DDP module at each
        # forward.
        if state is not None:
            ddp.follow(state, wrapper)


_averaged_by_wrapper: WeakKeyDictionary[DistributedDataParallel, _Averaged] = WeakKeyDictionary()


def _averaged(wrapper: DistributedDataParallel, module: nn.Module) -> _Averaged:
    if wrapper not in _averaged_by_wrapper:
        _averaged_by_wrapper[wrapper] = _Averaged(wrapper, module)
    return _averaged_by_wrapper[wrapper]


def averages_in_graph(module: nn.Module) -> bool:
    """Return whether ``replicate`` was applied to a module, in ways that a graph can hold."""
    state = dynamo_modules.module_state(module)
    return isinstance(state, ddp.ReplicateState) and not ddp.custom_averaging(
        ddp.replicated_module(state)
    )


def _forward(tx: Any, args: list[Any], kwargs: Any) -> Any:
    """``DistributedDataParallel.forward``."""
    receiver, *inputs = args
    wrapper = dynamo_building.python_object(receiver)
    inputs, keywords = (
        dynamo_modules.build_tuple(tx, inputs),
        dynamo_building.build_dict(tx, kwargs),
    )
    given = _enter(tx, wrapper, receiver, inputs, keywords)
    output = dynamo_building.call_traced(tx, _call, [receiver, given], {})
    return _leave(tx, wrapper, output)


def _pre_forward(tx: Any, args: list[Any], kwargs: Any) -> Any:
    """The hook of ``replicate`` before forward."""
    state = dynamo_building.python_object(args[0])
    return _enter(tx, ddp.replicated_module(state), *args[1:])


def _post_forward(tx: Any, args: list[Any], kwargs: Any) -> Any:
    """Trace the hook of ``replicate`` that runs after forward."""
    return _leave(tx, ddp.replicated_module(dynamo_building.python_object(args[0])), args[-1])


def _enter(tx: Any, wrapper: Any, origin: Any, inputs: Any, keywords: Any) -> Any:
    """The arguments as forward gets them, once parameters read as averaged.

    ``origin`` tracks the module that DDP or ``replicate`` was applied to.
    """
    _refuse(wrapper)
    module = _module(dynamo_building.python_object(origin))
    averaged = _averaged(wrapper, module)
    averaged.follow(wrapper)
    synchronizes = _synchronizes(tx, wrapper)
    tracker = dynamo_building.build_by_weakref(tx, averaged)
    is_first = wrapper not in unsharded_parameters.reads(tx).entered
    if not is_first and synchronizes and ddp.shares_buffers(wrapper):
        dynamo_building.call_traced(
            tx, _share_buffers, [dynamo_building.build_by_weakref(tx, wrapper)], {}
        )
    if is_first:
        dynamo_guards.guard(tracker, dynamo_guards.value_guard("settings", _Averaged.settings))
        begin = begin_step if dynamo_calls.computes_gradients(tx) else begin_forward
        dynamo_calls.call_before_graph(tx, tracker.source, begin)
    ranks = dist.get_process_group_ranks(wrapper.process_group) if synchronizes else ()
    # Behind its first forward in a graph the parameters stay averaged, up to a backward.
    is_averaged = unsharded_parameters.is_whole(tx, id(wrapper))
    table: Iterable[tuple[Place, Read]] = ()
    if synchronizes and not is_averaged:
        if is_first:
            _refuse_early_reads(tx, averaged)
        table = _table(tx, averaged, wrapper, module, tracker)
    unsharded_parameters.enter(tx, wrapper, table, ranks)
    device = ddp.input_device(wrapper)
    given = [dynamo_building.build(tx, device), inputs, keywords]
    return dynamo_building.call_traced(tx, _moved, given, {})


@torch.compiler.disable  # type: ignore[untyped-decorator]
def begin_forward(averaged: _Averaged) -> None:
    """Called before a graph that holds the forward."""
    wrapper = averaged.wrapper()
    if wrapper is not None and ddp.begin_forward(wrapper):
        averaged.averaging.expect()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def begin_step(averaged: _Averaged) -> None:
    """Called before a graph that holds the backward too: no other averages what it computes."""
    if (wrapper := averaged.wrapper()) is not None:
        ddp.begin_forward(wrapper)


def _synchronizes(tx: Any, wrapper: DistributedDataParallel) -> bool:
    """Return whether a forward that is traced now averages: the program may be in ``no_sync``."""
    averaged = _averaged_by_wrapper[wrapper]
    state = None if averaged._state is None else averaged._state()
    wanted = dynamo_building.attribute_so_far(tx, wrapper, ddp.SYNCHRONIZES)
    if state is not None:
        wanted = not dynamo_building.attribute_so_far(tx, state, ddp.QUIET)
    return torch.is_grad_enabled() and wanted


def _module(origin: nn.Module) -> nn.Module:
    """The module whose parameters are averaged: ``replicate`` gives its wrapper their list
    alone.
    """
    return origin.module if isinstance(origin, DistributedDataParallel) else origin


def _leave(tx: Any, wrapper: Any, output: Any) -> Any:
    """Return forward's output, from which all parameters' backward runs if ranks may differ."""
    known = unsharded_parameters.reads(tx)
    averaged = _averaged_by_wrapper[wrapper]
    # A parameter stays averaged: what the graph computes from it behind forward adds to the same
    # gradient.
    unsharded_parameters.leave(tx, wrapper, [])
    if not _synchronizes(tx, wrapper):
        return output
    if ddp.may_differ(wrapper):
        tokens = dynamo_building.build_list(tx, _tokens(tx)[id(wrapper)])
        output = dynamo_building.call_traced(tx, _attached, [output, tokens], {})
        output, count = dynamo_building.items_of(tx, output)
        if not dynamo_building.python_object(count):
            _break(
                "Its forward returns no tensor with a gradient in lists, tuples or dictionaries."
            )
        return output
    for table, name, place in averaged.averaging.registered:
        if (id(wrapper), place) not in known.read and table[name].requires_grad:
            _break(
                f"Its parameter {name!r} of shape {tuple(table[name].shape)} is not read in its "
                "forward: DDP averages what is accumulated for it elsewhere."
            )
    return output


def _tokens(tx: Any) -> dict[int, list[Any]]:
    """What the operators of a trace gave for ``_attached``, by id of the wrapper."""
    found: dict[int, list[Any]] = dynamo_calls.trace_state(tx, dict, "_dynamo_dist_tokens")
    return found


def _attached(output: Any, tokens: list[torch.Tensor]) -> tuple[Any, int]:
    leaves, spec = tree_flatten(output)
    count = 0
    for i, each in enumerate(leaves):
        if isinstance(each, torch.Tensor) and each.requires_grad:
            leaves[i] = torch.ops.dynamo_dist_parallel.attached(each, tokens)
            count += 1
    return tree_unflatten(leaves, spec), count


def _refuse_early_reads(tx: Any, averaged: _Averaged) -> None:
    early = [*_registered(tx, averaged)]
    # A step that begins with ``zero_grad`` asks for the parameters and computes nothing from them:
    # what it computes later from them is looked at when the graph comes to its backward.
    if early and dynamo_calls.is_our_backend(tx):
        dynamo_calls.expect_gradients(tx)
    if early and not (
        dynamo_calls.computes_gradients(tx)
        and not any(any(dynamo_calls.uses_with_gradient(each)) for each in early)
    ):
        _break("The graph reads one of its parameters before its forward, and so by itself.")


def _registered(tx: Any, averaged: _Averaged) -> Iterator[Any]:
    """The trackers of the registered parameters that the graph uses so far."""
    own = set(map(id, averaged.averaging.params))
    for each in dynamo_calls.tensor_inputs(tx):
        if id(dynamo_calls.real_tensor(tx, each)) in own:
            yield each


def is_any_used_alone(tx: Any) -> bool:
    """Return whether the graph computes something with a history from a parameter of DDP, beside
    its averages: DDP would average that gradient too.
    """
    return any(
        operation is not torch.ops.dynamo_dist_parallel.averaged.default
        for wrapper in unsharded_parameters.reads(tx).outermost
        if isinstance(wrapper, DistributedDataParallel)
        for each in _registered(tx, _averaged_by_wrapper[wrapper])
        for operation in dynamo_calls.uses_with_gradient(each)
    )


def take_accumulated(tx: Any, loss: Any) -> list[tuple[Any, Any]]:
    """Take what the parameters that ``loss`` averages have accumulated: DDP averages it with the
    gradients of the backward that begins. With each what it belongs to, as passed on by the
    operator.
    """
    found: list[tuple[Any, Any]] = []
    behind = dynamo_calls.history_of(loss)
    for params, passed in _passed(tx):
        if any(each.as_proxy().node in behind for each in passed):
            given = [unsharded_parameters.has_gradient(tx, each) for each in params]
            for each, param in compress(zip(passed, params, strict=True), given):
                found.append((each, unsharded_parameters.take_gradient(tx, param)))
    return found


def _passed(tx: Any) -> list[tuple[list[Any], list[Any]]]:
    """Of each averaging operator of a trace: the parameters, and what it passed on."""
    found: list[Any] = dynamo_calls.trace_state(tx, list, "_dynamo_dist_passed")
    return found


def _table(
    tx: Any, averaged: _Averaged, wrapper: Any, module: nn.Module, tracker: Any
) -> Iterator[tuple[Place, Read]]:
    unsharded = _through_operators(tx, averaged, wrapper, tracker)
    for place, owner, name in ddp.averaged_parameters(wrapper, module):
        key = id(wrapper), place
        yield (id(owner), name), Read(key, whole=unsharded[place], kept=True)


def _through_operators(tx: Any, averaged: _Averaged, wrapper: Any, tracker: Any) -> dict[int, Any]:
    """Return trackers, by place, of the parameters as passed on by the averaging operators."""
    averaging, group = averaged.averaging, wrapper.process_group
    # Where a graph computes gradients itself, they are those of the parameters.
    in_graph = dynamo_calls.computes_gradients(tx)
    key = "" if in_graph else averaging.key
    source = dynamo_building.build_by_weakref(tx, wrapper).source if in_graph else tracker.source
    values, member = (averaging.params, ddp.PARAMETERS) if in_graph else (averaged.leaves, "leaves")
    found: dict[int, Any] = {}
    tokens = _tokens(tx)[id(wrapper)] = []
    for number, places in enumerate(averaging.buckets):
        read = [
            dynamo_building.build(tx, values[i], dynamo_building.member_source(source, member, i))
            for i in places
        ]
        used = None
        if ddp.may_differ(wrapper):
            used = dynamo_building.build(
                tx,
                averaged.used[number],
                dynamo_building.member_source(tracker.source, "used", number),
            )
        launch = (group.group_name, group.size(), key, list(places))
        given = [dynamo_building.build_list(tx, read), used or dynamo_building.build(tx, None)]
        given += [dynamo_building.build(tx, each) for each in launch]
        operator = torch.ops.dynamo_dist_parallel.averaged.default
        results = dynamo_building.items_of(tx, dynamo_building.call_traced(tx, operator, given, {}))
        tokens += results[len(places) :]
        if in_graph:
            _passed(tx).append((read, results[: len(places)]))
        found.update(zip(places, results, strict=False))
    return found


def _call(self: Any, given: tuple[Any, Any]) -> Any:
    return self.module(*given[0], **given[1])


def _moved(device: torch.device | None, args: Any, kwargs: Any) -> tuple[Any, Any]:
    if device is None:
        return args, kwargs
    moved: tuple[Any, Any] = tree_map_only(
        torch.Tensor, lambda each: each.to(device), (args, kwargs)
    )
    return moved


def _share_buffers(self: Any) -> None:
    """Take over the first rank's buffers, in one launch a dtype: before the second forward in a
    graph.
    """
    with torch.no_grad():
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self.modules_buffers:
            # One broadcast a dtype, as only tensors of one dtype can be joined.
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([each.reshape(-1) for each in buffers])
            dist.broadcast(flat, group_src=0, group=self.process_group)
            parts = flat.split([each.numel() for each in buffers])
            for each, part in zip(buffers, parts, strict=True):
                each.copy_(part.view(each.shape))


def _refuse(wrapper: Any) -> None:
    """Break where a graph cannot hold what the wrapper asks for."""
    custom = ddp.custom_averaging(wrapper)
    if custom:
        _break(f"A graph has no counterpart of its {custom}.")
    if unsharded_parameters.is_broken(wrapper, ddp.synchronizes(wrapper)):
        _break(f"{unsharded_parameters.BROKEN} Its averages may not be parted from it.")
    params = ddp.parameters(wrapper)
    if any(param._post_accumulate_grad_hooks for param in params):
        _break(
            "A hook behind accumulation stands on one of its parameters, which sees the gradient "
            "before its average."
        )
    if any(isinstance(param, DTensor) for param in params):
        _break("One of its parameters is a DTensor, whose gradient DDP's reducer flattens.")


def _break(why: str) -> None:
    dynamo_building.graph_break(
        "DistributedDataParallel module called in a compiled function",
        "DistributedDataParallel.forward",
        why,
        "Compile what DDP wraps: ddp = DistributedDataParallel(torch.compile(module))",
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _ran_eagerly(wrapper: DistributedDataParallel) -> None:
    unsharded_parameters.ran_eagerly(wrapper, ddp.synchronizes(wrapper))


def ddp_answers() -> dict[Any, Callable[..., Any]]:
    """What is traced in place of DDP's forward and the hooks of ``replicate``, by function."""
    return {ddp.FORWARD: _forward, ddp.PRE_FORWARD: _pre_forward, ddp.POST_FORWARD: _post_forward}


def patches() -> list[Patch]:
    """List the patches that enabling makes for eager calls of DDP modules."""
    return ddp.on_eager_ddp_forward(_ran_eagerly)
