"""``with implicit_replication():`` inside a compiled function, or around one.

The context turns a switch of DTensor's dispatcher, by which plain tensors count as replicated. Turned
while tracing it must stand as it does in eager at each operation, for Dynamo, which runs the operations on
fake tensors, and for AOTAutograd, which runs Dynamo's graph: so each turn becomes a call in that graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch.fx
from torch.distributed.tensor.experimental import implicit_replication

from dynamo_dist.torch_compat import dynamo_building, dynamo_dtensors, dynamo_trackers
from dynamo_dist.torch_compat.patching import Change


@torch.fx.has_side_effect
def turn(on: bool) -> None:
    """In the graph: turn the switch. Nothing is left of it once AOTAutograd has run the graph."""
    dynamo_dtensors.set_implicit_replication(on)


@contextlib.contextmanager
def _context() -> Iterator[None]:
    """Stand in for the context while tracing."""
    try:
        turn(True)
        yield
    finally:
        turn(False)


def _enter(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return dynamo_building.call_traced(tx, _context, args, kwargs)


def _turn(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    dynamo_dtensors.restore_implicit_replication(tx)
    dynamo_dtensors.call_for_effect(tx, turn, args[0].as_python_constant())
    return dynamo_building.build(tx, None)


def implicit_replication_changes() -> list[Change]:
    """List the changes that enabling makes for the context."""
    return [
        *dynamo_trackers.on_function(implicit_replication, _enter),
        *dynamo_trackers.on_function(turn, _turn),
        *dynamo_dtensors.keep_implicit_replication(),
    ]
