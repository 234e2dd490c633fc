"""Instances of classes that derive from DTensor: a compiled function leaves them to eager mode.

AOTAutograd takes what they hold for a DTensor's, and stops when the function runs.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat import dynamo_building, dynamo_trackers
from dynamo_dist.torch_compat.patching import Change


def is_of_a_subclass(value: object) -> bool:
    """Return whether it is a DTensor of a class of its own."""
    return isinstance(value, DTensor) and type(value) is not DTensor


def _refuse_subclasses(tx: Any, value: Any, source: Any) -> Any:
    dynamo_building.graph_break(
        "Tensor of a subclass of DTensor",
        type(value).__name__,
        "A graph makes DTensors and knows nothing of a class that derives from it.",
        "Give the function a DTensor: DTensor.from_local(x.to_local(), x.device_mesh, x.placements)",
    )


def subclasses_changes() -> list[Change]:
    """List the changes that enabling makes for subclasses."""
    return dynamo_trackers.on_values(DTensor, is_of_a_subclass, _refuse_subclasses)
