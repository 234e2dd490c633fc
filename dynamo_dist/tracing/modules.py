"""Modules while tracing: their hooks, and the state of composable APIs and wrappers.

Upstream compiles ``forward`` and leaves the module's own hooks around it: each becomes a graph of
its own, and what no frame of the user holds, such as the hooks of parallel styles, breaks. Here the
whole call is one frame, as it is for a submodule.

They find it in a dictionary of all modules of the process, which upstream guards by its length: any
module that is sharded later would recompile everything. Here only the module itself is guarded.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamo_dist.settings import DistConfig
from dynamo_dist.torch_compat import (
    dynamo_building,
    dynamo_guards,
    dynamo_modules,
    dynamo_trackers,
    fsdp,
)
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import backward, ddp, fsdp2, optimizers, unsharded_parameters


def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``_get_module_state(module)``; None leaves it to upstream, for a module that is a state
    itself.
    """
    tracker = [*args, *kwargs.values()][0]
    module = dynamo_building.python_object(tracker)
    if not isinstance(module, nn.Module) or isinstance(module, dynamo_modules.State):
        return None
    dynamo_guards.guard(dynamo_building.realized(tracker), dynamo_guards.IDENTITY_MATCH)
    state = dynamo_modules.module_state(module)
    return (
        dynamo_building.build(tx, None)
        if state is None
        else dynamo_building.build_by_weakref(tx, state)
    )


def explain_state_dict(text: str) -> None:
    """Say what to write where this torch cannot trace the attribute that ``state_dict`` sets."""
    if "_metadata" in text:
        dynamo_building.graph_break(
            "state_dict() in a compiled function",
            "Module.state_dict",
            "It sets an attribute of a dictionary, which this torch cannot trace.",
            "Take the tensors by name: {name: p.detach() for name, p in model.named_parameters()}",
        )


def has_traced_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks of its own that belong in the graph.

    Those of other composable APIs do not: they run around it.
    """
    if dynamo_modules.module_state(module) is not None:
        return fsdp2.shards_in_graph(module) or ddp.averages_in_graph(module)
    # Upstream calls every module of torch's, and so all of DDP, through one function that is given
    # up for all at once.
    return isinstance(module, DistributedDataParallel) or any(
        getattr(module, name) for name in unsharded_parameters.HOOKS
    )


def whole_call(module: nn.Module) -> Callable[..., object]:
    """The module's call, hooks and all, as a function with a code object, and so a compile cache,
    of its own.

    It bears the class's name: sizes that vary are remembered by name.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    code = call.__code__.replace(co_name=type(module).__name__)
    return FunctionType(code, call.__globals__, code.co_name, None, (call.__closure__ or ()))


def runs_around(module: nn.Module) -> bool:
    """Return whether its hooks run outside of the graph of its forward, because those of its parent
    do.

    While a caller is traced they are part of that trace.
    """
    return torch.compiler.is_compiling() or fsdp2.is_called_eagerly(module)


def _sharded_later(managed: list[nn.Module], _: set[nn.Parameter]) -> None:
    """A module that is sharded after it was compiled, as accelerate does it, has its hooks in
    the graph as well.
    """
    for module in managed:
        dynamo_modules.compile_as_one_graph_later(
            module, fsdp2.shards_in_graph, whole_call, _is_no_root_in_graph
        )


def _is_no_root_in_graph(module: nn.Module) -> bool:
    return dynamo_modules.module_state(module) is None or runs_around(module)


def patches(config: DistConfig) -> list[Patch]:
    """Everything to apply, in order; nothing is applied here."""
    return [
        *dynamo_modules.on_module_compiled(has_traced_hooks, whole_call, runs_around),
        *fsdp.on_sharding(_sharded_later),
        *dynamo_trackers.on_function(dynamo_modules.module_state, answer),
        *backward.patches(),
        *optimizers.patches(),
        *dynamo_modules.on_methods(
            {
                **fsdp2.fsdp_answers(),
                **ddp.ddp_answers(),
                **optimizers.answers(),
            },
            {nn.Module.state_dict: explain_state_dict},
            fsdp.hook_of,
        ),
        *unsharded_parameters.patches(),
        *ddp.patches(),
        *fsdp2.patches(),
    ]
