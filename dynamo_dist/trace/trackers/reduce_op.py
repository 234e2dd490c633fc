"""``dist.ReduceOp(...)`` while tracing: an object of constants."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from dynamo_dist.torch_compat import dynamo_building, dynamo_trackers
from dynamo_dist.torch_compat.patching import Change


def _made(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The op that these constants make; None leaves others to stock."""
    if len(args) != 1 or kwargs:
        return None
    try:
        value = dynamo_building.python_object(args[0])
    except NotImplementedError:
        return None
    return dynamo_building.build_unchanging(tx, dist.ReduceOp(value))


def reduce_op_changes() -> list[Change]:
    """List the changes that enabling makes for the class."""
    return dynamo_trackers.on_construction(dist.ReduceOp, _made)
