"""The hooks of the module that is compiled, in one graph with its forward.

Stock compiles ``forward`` and leaves the module's own hooks around it: each becomes a graph of its own,
and what no frame of the user holds, such as the hooks of parallel styles, breaks. Here the whole call is
one frame, as it is for a submodule.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch import nn

from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.dynamo import modules

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_traced_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks of its own that belong in the graph.

    Those of FSDP2 and other composable APIs do not: they run around it.
    """
    return any(getattr(module, name) for name in _HOOKS) and modules.module_state(module) is None


def whole_call(module: nn.Module) -> Callable[..., Any]:
    """``module(*args, **kwargs)`` as a function with a code object, and so a compile cache, of its own."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return FunctionType(
        call.__code__.replace(), call.__globals__, "call", None, (call.__closure__ or ())
    )


def changes() -> list[Change]:
    """List the changes that enabling makes for the hooks of a compiled module."""
    return modules.on_module_compiled(has_traced_hooks, whole_call)
