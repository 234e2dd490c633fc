"""``CommDebugMode`` inside a compiled function: refused, with the way that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch.distributed.tensor.debug import CommDebugMode

from dynamo_dist.torch_compat.dynamo import building


def refuse(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> NoReturn:
    """Break the graph where the program makes the mode."""
    building.graph_break(
        "CommDebugMode inside a compiled function",
        "CommDebugMode()",
        "It counts what runs inside it, and a graph runs later, without it.",
        'Count in eager mode, around the call: with torch.compiler.set_stance("force_eager"), '
        "CommDebugMode() as mode: compiled(x)",
    )


CONSTRUCTED: dict[type, Callable[..., Any]] = {CommDebugMode: refuse}
