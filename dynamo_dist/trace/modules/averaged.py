"""DDP in a compiled function: the averages of gradients are operations of its backward graph.

DDP's reducer averages buckets from hooks, while autograd runs. Here a parameter reads as itself, with a backward
that averages, and the reducer sleeps in that call, as it does under ``no_sync``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from dynamo_dist.parallel.gather import Gather, Ranks
from dynamo_dist.torch_compat import ddp
from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.dynamo import building, calls, guards, modules, reached
from dynamo_dist.trace.modules import whole_parameters
from dynamo_dist.trace.modules.whole_parameters import Place, Read


def averages_in_graph(module: nn.Module) -> bool:
    """Return whether ``replicate`` was applied to a module, in ways that a graph can hold."""
    state = modules.module_state(module)
    return isinstance(state, ddp.ReplicateState) and not ddp.custom_averaging(
        ddp.replicated_module(state)
    )


def _forward(tx: Any, args: list[Any], kwargs: Any) -> Any:
    """``DistributedDataParallel.forward``."""
    receiver, *inputs = args
    wrapper = building.python_object(receiver)
    _note(tx, wrapper, _itself, receiver)
    inputs, keywords = modules.build_tuple(tx, inputs), building.build_dict(tx, kwargs)
    given = _enter(tx, wrapper, wrapper.module, inputs, keywords)
    output = building.call_traced(tx, _call, [receiver, given], {})
    _leave(tx, wrapper, wrapper.module)
    return output


def _pre_forward(tx: Any, args: list[Any], kwargs: Any) -> Any:
    """The hook of ``replicate`` before forward."""
    state, module = (building.python_object(each) for each in args[:2])
    wrapper = ddp.replicated_module(state)
    if ddp.state_of_replicated(module) is state:
        _note(tx, wrapper, _of_replicated, args[1])
    return _enter(tx, wrapper, module, *args[2:])


def _post_forward(tx: Any, args: list[Any], kwargs: Any) -> Any:
    """The hook of ``replicate`` behind forward."""
    state, module = (building.python_object(each) for each in args[:2])
    _leave(tx, ddp.replicated_module(state), module)
    return args[-1]


def _enter(tx: Any, wrapper: Any, module: nn.Module, inputs: Any, keywords: Any) -> Any:
    """The arguments as forward gets them, once parameters read as averaged."""
    _refuse(wrapper)
    tracker = building.build_by_weakref(tx, wrapper)
    guards.guard(tracker, guards.value_guard("settings", ddp.averaging_settings))
    learns = torch.is_grad_enabled()
    calls.call_before_graph(tx, tracker.source, ddp.settle_averaged if learns else ddp.evaluated)
    if not learns:
        guards.guard(tracker, guards.value_guard("last forward", ddp.is_behind_step))
    if ddp.shares_buffers(wrapper) and (learns or ddp.is_behind_step(wrapper)):
        building.call_traced(tx, _share_buffers, [tracker], {})
    ranks = dist.get_process_group_ranks(wrapper.process_group) if learns else ()
    whole_parameters.enter(tx, wrapper, _table(tracker.source, wrapper, module), ranks)
    device = ddp.input_device(wrapper)
    given = [building.build(tx, device), inputs, keywords]
    return building.call_traced(tx, _moved, given, {})


def _note(tx: Any, wrapper: Any, find: Callable[[Any], Any], tracker: Any) -> None:
    begin = _begin if torch.is_grad_enabled() and not whole_parameters.reads(tx).inside else None
    reached.note(tx, wrapper, find, building.realized(tracker), _read, begin)


def _itself(wrapper: Any) -> Any:
    return wrapper


def _of_replicated(module: nn.Module) -> Any:
    return ddp.replicated_module(ddp.state_of_replicated(module))


def _read(wrapper: Any, origin: nn.Module) -> tuple[Any, ...]:
    """What ``_table`` holds of a wrapper, and what ``_enter`` asks: for a frame that was traced in another process."""
    module = _averaged(origin)
    names = {id(each): name for name, each in module.named_modules(remove_duplicate=False)}
    table = tuple(
        (names[id(owner)], name, place, whole_parameters.constants_of(gather))
        for owner, name, place, gather in _averages(wrapper, module)
    )
    asked = ddp.input_device(wrapper), ddp.shares_buffers(wrapper), ddp.custom_averaging(wrapper)
    return table, asked, whole_parameters.is_broken(wrapper)


def _averaged(origin: nn.Module) -> nn.Module:
    """The module whose parameters are averaged: ``replicate`` gives its wrapper their list alone."""
    return origin.module if isinstance(origin, DistributedDataParallel) else origin


def _begin(wrapper: Any, origin: nn.Module) -> None:
    """Settle with the other ranks that the forward runs in a graph, which was traced in another process."""
    module = _averaged(origin)
    params = [(name, gather) for _, name, _, gather in _averages(wrapper, module)]
    ranks = dist.get_process_group_ranks(wrapper.process_group)
    whole_parameters.begin(wrapper, params, ranks)


def _leave(tx: Any, wrapper: Any, module: nn.Module) -> None:
    source = building.build_by_weakref(tx, wrapper).source
    whole_parameters.leave(tx, wrapper, _table(source, wrapper, module))


def _table(source: Any, wrapper: Any, module: nn.Module) -> Iterator[tuple[Place, Read]]:
    for owner, name, place, gather in _averages(wrapper, module):
        param = ddp.averaged_parameter(wrapper, place)
        read = Read((id(wrapper), place), gather, _registered(source, param, place))
        yield (id(owner), name), read


def _averages(wrapper: Any, module: nn.Module) -> Iterator[tuple[nn.Module, str, int, Gather]]:
    group = wrapper.process_group
    ranks = Ranks(group.group_name, group.size())
    for place, owner, name in ddp.averaged_parameters(wrapper, module):
        param = ddp.averaged_parameter(wrapper, place)
        rows = param.shape[0] if param.ndim else 0
        yield owner, name, place, Gather(rows, None, ranks, None, None, False, None)


def _registered(source: Any, param: nn.Parameter, place: int) -> Callable[[Any], Any]:
    steps = building.member_source(source, ddp.PARAMETERS, place)
    return lambda tx: building.build(tx, param, steps)


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
    """Take over the first rank's buffers, in one launch a dtype."""
    with torch.no_grad():
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for buffer in self.modules_buffers:
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
    if not custom and not whole_parameters.is_broken(wrapper):
        return
    building.graph_break(
        "DistributedDataParallel module called in a compiled function",
        "DistributedDataParallel.forward",
        f"A graph has no counterpart of its {custom}."
        if custom
        else f"{whole_parameters.BROKEN} Its averages may not be parted from it.",
        "Compile what DDP wraps: ddp = DistributedDataParallel(torch.compile(module))",
    )


def ddp_answers() -> dict[Any, Callable[..., Any]]:
    """What is traced in place of DDP's forward and the hooks of ``replicate``, by function."""
    return {ddp.FORWARD: _forward, ddp.PRE_FORWARD: _pre_forward, ddp.POST_FORWARD: _post_forward}


def changes() -> list[Change]:
    """List the changes that enabling makes for eager calls of DDP modules."""
    return ddp.on_eager_averages(whole_parameters.ran_eagerly)
