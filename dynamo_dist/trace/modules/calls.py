"""The hooks of the module that is compiled, in one graph with its forward.

Stock compiles ``forward`` and leaves the module's own hooks around it: each becomes a graph of its own,
and what no frame of the user holds, such as the hooks of parallel styles, breaks. Here the whole call is
one frame, as it is for a submodule.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dynamo_dist.torch_compat import dynamo_modules, fsdp
from dynamo_dist.torch_compat.patching import Change
from dynamo_dist.trace.modules import averaged, fully_sharded

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_traced_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks of its own that belong in the graph.

    Those of other composable APIs do not: they run around it.
    """
    if dynamo_modules.module_state(module) is not None:
        return fully_sharded.shards_in_graph(module) or averaged.averages_in_graph(module)
    # Stock calls every module of torch's, and so all of DDP, through one function that is given up for all at once.
    return isinstance(module, DistributedDataParallel) or any(
        getattr(module, name) for name in _HOOKS
    )


def whole_call(module: nn.Module) -> Callable[..., Any]:
    """The module's call, hooks and all, as a function with a code object, and so a compile cache, of its own.

    It bears the class's name: sizes that vary are remembered by name.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    code = call.__code__.replace(co_name=type(module).__name__)
    return FunctionType(code, call.__globals__, code.co_name, None, (call.__closure__ or ()))


def runs_around(module: nn.Module) -> bool:
    """Return whether its hooks run outside of the graph of its forward, because those of its parent do.

    While a caller is traced they are part of that trace.
    """
    return torch.compiler.is_compiling() or fully_sharded.is_called_eagerly(module)


def _sharded_later(managed: list[nn.Module], _: set[nn.Parameter]) -> None:
    """A module that is sharded after it was compiled, as accelerate does it, has its hooks in the graph as well."""
    for module in managed:
        dynamo_modules.compile_whole_later(
            module, fully_sharded.shards_in_graph, whole_call, _is_no_root_in_graph
        )


def _is_no_root_in_graph(module: nn.Module) -> bool:
    return dynamo_modules.module_state(module) is None or runs_around(module)


def calls_changes() -> list[Change]:
    """List the changes that enabling makes for the hooks of a compiled module."""
    return [
        *dynamo_modules.on_module_compiled(has_traced_hooks, whole_call, runs_around),
        *fsdp.on_sharding(_sharded_later),
    ]
