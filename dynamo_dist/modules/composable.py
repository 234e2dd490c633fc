"""The state that FSDP2 and other composable APIs keep for a module, while tracing.

They find it in a dictionary of all modules of the process, which stock guards by its length: any module
that is sharded later would recompile everything. Here only the module itself is guarded.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from dynamo_dist.modules import _torch


def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``_get_module_state(module)``; None leaves it to stock, for a module that is a state itself."""
    tracker = [*args, *kwargs.values()][0]
    module = _torch.python_object(tracker)
    if not isinstance(module, nn.Module) or isinstance(module, _torch.State):
        return None
    _torch.guard(_torch.realized(tracker), _torch.IDENTITY_MATCH)
    state = _torch.module_state(module)
    return _torch.build(tx, None) if state is None else _torch.build_by_weakref(tx, state)


def changes() -> list[_torch.Change]:
    """List the changes that enabling makes for the states of modules."""
    return _torch.on_function(_torch.module_state, answer)
