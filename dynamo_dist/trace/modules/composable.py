"""The state that FSDP2 and other composable APIs keep for a module, while tracing.

They find it in a dictionary of all modules of the process, which stock guards by its length: any module
that is sharded later would recompile everything. Here only the module itself is guarded.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.dynamo import building, guards, modules, trackers


def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``_get_module_state(module)``; None leaves it to stock, for a module that is a state itself."""
    tracker = [*args, *kwargs.values()][0]
    module = building.python_object(tracker)
    if not isinstance(module, nn.Module) or isinstance(module, modules.State):
        return None
    guards.guard(building.realized(tracker), guards.IDENTITY_MATCH)
    state = modules.module_state(module)
    return building.build(tx, None) if state is None else building.build_by_weakref(tx, state)


def changes() -> list[Change]:
    """List the changes that enabling makes for the states of modules."""
    return trackers.on_function(modules.module_state, answer)
