"""DDP's state of a module, read as plain data, and what its reducer may have left pending."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import _ReplicateState, replicate
from torch.nn.parallel import DistributedDataParallel

from dynamo_dist.torch_compat.changes import Change, WrapAttribute

FORWARD: Any = DistributedDataParallel.forward
ReplicateState = _ReplicateState
# The hooks of ``replicate``, whose state holds a DDP module.
PRE_FORWARD: Any = ReplicateState.forward_pre_hook
POST_FORWARD: Any = ReplicateState.forward_post_hook


def replicated_module(state: ReplicateState) -> DistributedDataParallel:
    """The DDP module of ``replicate``'s state, made when the first forward runs."""
    if state._init_args or state._init_kwargs:
        state.lazy_init()
    return state._ddp


def state_of_replicated(module: nn.Module) -> Any:
    """The state that ``replicate`` keeps for a module; None if it was not applied to it."""
    try:
        return replicate.state(module)
    except (AssertionError, AttributeError, KeyError):
        return None


def custom_averaging(ddp: DistributedDataParallel) -> str:
    """Return what of a DDP module has no counterpart in a graph, or ""."""
    if ddp._comm_hooks:
        return "communication hook"
    if ddp._join_config.enable:
        return "join()"
    if ddp._delay_all_reduce_params:
        return "delay_all_reduce_named_params"
    if ddp.mixed_precision is not None:
        return "mixed_precision"
    if ddp._use_python_reducer:
        return "reducer in Python (optimize_ddp)"
    if "buffer_hook" in vars(ddp):
        return "buffer hook"
    if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
        return "static_graph, whose first iteration its reducer has to see,"
    return ""


def averaging_settings(ddp: DistributedDataParallel) -> tuple[Any, ...]:
    """What a program may set on a DDP module after it was made, as far as a graph depends on it."""
    return bool(ddp._comm_hooks), ddp._join_config.enable, "buffer_hook" in vars(ddp)


def averaged_parameters(
    ddp: DistributedDataParallel, module: nn.Module
) -> Iterator[tuple[int, nn.Module, str]]:
    """Every parameter whose gradient is averaged, by its place in ``PARAMETERS``, wherever ``module`` registers it."""
    places = {id(param): i for i, param in enumerate(ddp._module_parameters) if param.requires_grad}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and id(param) in places:
                yield places[id(param)], owner, name


PARAMETERS = "_module_parameters"


def averaged_parameter(ddp: DistributedDataParallel, place: int) -> nn.Parameter:
    """One of the parameters that are averaged."""
    found: nn.Parameter = getattr(ddp, PARAMETERS)[place]
    return found


def input_device(ddp: DistributedDataParallel) -> torch.device | None:
    """The device that inputs are brought to, or None."""
    if not ddp.device_ids:
        return None
    return torch.device(ddp.device_type, ddp.device_ids[0])


def shares_buffers(ddp: DistributedDataParallel) -> bool:
    """Return whether forwards begin with the buffers of the first rank: those behind a step do."""
    shares = getattr(ddp, "forward_sync_buffers", ddp.broadcast_buffers)
    return bool(shares and ddp.modules_buffers)


def is_behind_step(ddp: DistributedDataParallel) -> bool:
    """Return whether the last forward was one whose gradients were averaged."""
    return bool(ddp.require_forward_param_sync)


# Those whose gradients the eager reducer has not averaged yet.
# By id, and gone with the module: Dynamo would trace the methods of a WeakSet, which are Python.
_unaveraged: dict[int, weakref.ref[DistributedDataParallel]] = {}


def settle_averaged(ddp: DistributedDataParallel) -> None:
    """Average what ``no_sync()`` has left in eager mode, and let the reducer sleep in the next backward."""
    ddp.reducer._reset_state()
    if _unaveraged.pop(id(ddp), None) is not None:
        _average(ddp)
    ddp.require_forward_param_sync = True


def _note_unaveraged(ddp: DistributedDataParallel) -> None:
    """Note whether the gradients of a forward in eager mode stay this rank's own."""
    key = id(ddp)
    if ddp.require_backward_grad_sync:
        _unaveraged.pop(key, None)
    else:
        _unaveraged[key] = weakref.ref(ddp, lambda _: _unaveraged.pop(key, None))


def evaluated(ddp: DistributedDataParallel) -> None:
    """Say that a forward without gradients has run: the next begins with each rank's own buffers."""
    ddp.require_forward_param_sync = False


def _average(ddp: DistributedDataParallel) -> None:
    params = [param for param in ddp._module_parameters if param.requires_grad]
    used = torch.tensor([int(p.grad is not None) for p in params], device=ddp.device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=ddp.process_group)
    for param, anywhere in zip(params, used.tolist(), strict=True):
        if anywhere:
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(grad.div_(ddp.process_group.size()), group=ddp.process_group)
            param.grad = grad


def on_eager_averages(note: Callable[[Any], None]) -> list[Change]:
    """Call ``note(ddp)`` when a forward begins in eager mode; note behind it whether its gradients will be averaged."""

    def before(stock: Any) -> Any:
        @functools.wraps(stock)
        def pre_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            note(self)
            return stock(self, *args, **kwargs)

        return pre_forward

    def behind(stock: Any) -> Any:
        @functools.wraps(stock)
        def post_forward(self: Any, output: Any) -> Any:
            if torch.is_grad_enabled():
                _note_unaveraged(self)
            return stock(self, output)

        return post_forward

    return [
        WrapAttribute(DistributedDataParallel, "_pre_forward", before),
        WrapAttribute(DistributedDataParallel, "_post_forward", behind),
    ]
