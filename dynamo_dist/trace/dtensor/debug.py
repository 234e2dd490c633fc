"""``CommDebugMode`` inside a compiled function: refused, with the way that works."""

from __future__ import annotations

from typing import Any, NoReturn

from torch.distributed.tensor.debug import CommDebugMode

from dynamo_dist.torch_compat import dynamo_building, dynamo_trackers
from dynamo_dist.torch_compat.patching import Change


def refuse(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> NoReturn:
    """Break the graph where the program makes the mode."""
    dynamo_building.graph_break(
        "CommDebugMode inside a compiled function",
        "CommDebugMode()",
        "It counts what runs inside it, and a graph runs later, without it.",
        'Count in eager mode, around the call: with torch.compiler.set_stance("force_eager"), '
        "CommDebugMode() as mode: compiled(x)",
    )


def debug_changes() -> list[Change]:
    """List the changes that enabling makes for the mode."""
    return dynamo_trackers.on_construction(CommDebugMode, refuse)
