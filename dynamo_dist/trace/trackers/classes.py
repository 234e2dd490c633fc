"""The classes themselves: ``hasattr(Shard, "dim")``, ``type(mesh) == DeviceMesh``."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from dynamo_dist.torch_compat import dynamo_trackers
from dynamo_dist.torch_compat.patching import Change

TRACKED = (dist.ProcessGroup, DeviceMesh, Placement)


def has_class_attribute(cls: Any, name: str) -> bool | None:
    """``hasattr(cls, name)`` of a tracked class; None for others, whose attributes may change."""
    if isinstance(cls, type) and issubclass(cls, TRACKED):
        return hasattr(cls, name)
    return None


def classes_changes() -> list[Change]:
    """List the changes that enabling any tracker makes for the classes."""
    return dynamo_trackers.extend_class_tracker(has_class_attribute)
