"""DDP's state of a module, read as plain data, and what it does around a forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch._C._distributed_c10d import _DEFAULT_FIRST_BUCKET_BYTES
from torch.distributed._composable.replicate import _ReplicateState, replicate
from torch.nn.parallel import DistributedDataParallel

from dynamo_dist.torch_compat.patching import Patch, Upstream, WrapFunction

FORWARD: object = DistributedDataParallel.forward
ReplicateState = _ReplicateState
# The hooks of ``replicate``, whose state holds a DDP module.
PRE_FORWARD: object = ReplicateState.forward_pre_hook
POST_FORWARD: object = ReplicateState.forward_post_hook


def replicated_module(state: ReplicateState) -> DistributedDataParallel:
    """The DDP module of ``replicate``'s state, made when the first forward runs."""
    if state._init_args or state._init_kwargs:
        state.lazy_init()
    return state._ddp


SYNCHRONIZES = "require_backward_grad_sync"  # of a DDP module
QUIET = "_no_sync"  # of the state of ``replicate``


def follow(state: ReplicateState, ddp: DistributedDataParallel) -> None:
    """Have the DDP module of ``replicate`` synchronise as its state says, which is what each
    forward does first.
    """
    ddp.require_backward_grad_sync = not state._no_sync


def state_of_replicated(module: nn.Module) -> ReplicateState | None:
    """The state that ``replicate`` keeps for a module; None if it was not applied to it."""
    try:
        return replicate.state(module)
    except (AssertionError, AttributeError, KeyError):
        return None


def custom_averaging(ddp: DistributedDataParallel) -> str:
    """Return what of a DDP module has no counterpart in a graph, or ""; decides what the first
    forward decides.
    """
    if not ddp._lazy_init_ran:
        ddp._lazy_init()
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
    # Afterwards the reducer knows the order of gradients, and a graph may take over.
    if ddp.static_graph and not ddp._static_graph_delay_allreduce_enqueued:
        return "static_graph, whose first iteration its reducer has to see,"
    if any(
        getattr(each, "sparse", False)
        for each in ddp.module.modules()
        if isinstance(each, _EMBEDDINGS)
    ):
        return "sparse gradients"
    return ""


_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def averaging_settings(ddp: DistributedDataParallel) -> tuple[object, ...]:
    """What a program may set on a DDP module after it was made, as far as a graph depends on it."""
    return (
        ddp.require_backward_grad_sync,
        bool(ddp._comm_hooks),
        ddp._join_config.enable,
        "buffer_hook" in vars(ddp),
        any(param._post_accumulate_grad_hooks for param in ddp._module_parameters),
    )


def synchronizes(ddp: DistributedDataParallel) -> bool:
    """Return whether the gradients of a forward that begins now are averaged."""
    return torch.is_grad_enabled() and ddp.require_backward_grad_sync


def may_differ(ddp: DistributedDataParallel) -> bool:
    """Return whether ranks may use other parameters each in a forward."""
    return bool(ddp.find_unused_parameters and not ddp.static_graph)


def bucket_capacities(ddp: DistributedDataParallel) -> tuple[int, ...]:
    """The bytes that DDP's first buckets of gradients hold, and last what all others hold."""
    # Newer versions let a program give the capacity of each bucket.
    if given := vars(ddp).get("bucket_bytes_cap_list"):
        return tuple(given)
    others = ddp.bucket_bytes_cap
    # DDP keeps its first bucket small by default, so that communication starts early in the
    # backward.
    first = _DEFAULT_FIRST_BUCKET_BYTES if ddp.bucket_bytes_cap_default else others
    return first, others


PARAMETERS = "_module_parameters"


def parameters(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """The parameters whose gradients are averaged, in DDP's order."""
    return list(ddp._module_parameters)


def averaged_parameters(
    ddp: DistributedDataParallel, module: nn.Module
) -> Iterator[tuple[int, nn.Module, str]]:
    """Every parameter whose gradient is averaged, by its place in ``parameters``, wherever
    ``module`` registers it.
    """
    places = {id(param): i for i, param in enumerate(ddp._module_parameters) if param.requires_grad}
    for owner in module.modules():
        for name, param in owner._parameters.items():
            if param is not None and id(param) in places:
                yield places[id(param)], owner, name


def input_device(ddp: DistributedDataParallel) -> torch.device | None:
    """The device that inputs are brought to, or None."""
    if not ddp.device_ids:
        return None
    return torch.device(ddp.device_type, ddp.device_ids[0])


def shares_buffers(ddp: DistributedDataParallel) -> bool:
    """Return whether forward takes the first rank's buffers, if it follows a synchronising one."""
    return bool(ddp.forward_sync_buffers and ddp.modules_buffers)


def begin_forward(ddp: DistributedDataParallel) -> bool:
    """Do what DDP does around a forward, but for its reducer, which sleeps in the next backward.

    Buffers are broadcast as in eager mode. Returns whether the gradients of the forward are
    averaged.
    """
    if ddp._check_sync_bufs_pre_fwd():
        ddp._sync_buffers()
    # DDP's next forward reads it to decide whether buffers are broadcast, in eager mode too.
    ddp.require_forward_param_sync = synchronizes(ddp)
    if ddp.require_forward_param_sync:
        # The reducer expects a backward after each synchronising forward, and would complain at the
        # next one.
        ddp.reducer._reset_state()
    return ddp.require_forward_param_sync


def on_eager_ddp_forward(note: Callable[[object], None]) -> list[Patch]:
    """Call ``note(ddp)`` when a forward begins in eager mode."""

    def pre_forward(upstream: Upstream, self: Any, *args: Any, **kwargs: Any) -> object:
        note(self)
        return upstream(self, *args, **kwargs)

    return [WrapFunction(DistributedDataParallel, "_pre_forward", pre_forward)]
