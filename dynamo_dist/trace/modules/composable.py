"""The state that FSDP2 and other composable APIs keep for a module, while tracing.

They find it in a dictionary of all modules of the process, which stock guards by its length: any module
that is sharded later would recompile everything. Here only the module itself is guarded.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dynamo_dist.torch_compat import dynamo_building, dynamo_guards, dynamo_modules, dynamo_trackers
from dynamo_dist.torch_compat.patching import Change


def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``_get_module_state(module)``; None leaves it to stock, for a module that is a state itself."""
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


def composable_changes() -> list[Change]:
    """List the changes that enabling makes for the states of modules."""
    return dynamo_trackers.on_function(dynamo_modules.module_state, answer)
