"""Trackers of groups, meshes and placements, and their place in Dynamo's tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from dynamo_dist.settings import DistConfig
from dynamo_dist.torch_compat import dynamo_guards, dynamo_meshes, dynamo_trackers
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import creation, device_mesh, placement, process_group

TRACKED = (dist.ProcessGroup, DeviceMesh, Placement)


def has_class_attribute(cls: object, name: str) -> bool | None:
    """``hasattr(cls, name)`` of a tracked class; None for others, whose attributes may change."""
    if isinstance(cls, type) and issubclass(cls, TRACKED):
        return hasattr(cls, name)
    return None


def classes_patches() -> list[Patch]:
    """List the changes that enabling any tracker makes for the classes."""
    return dynamo_trackers.extend_class_tracker(has_class_attribute)


@dataclass(frozen=True, slots=True)
class Registration:
    """One tracker: the type it tracks, its class, and what else it changes."""

    name: str
    traced: type
    tracker: type
    patches: Callable[[], list[Patch]]


TRACKERS = (
    Registration(
        "process_group",
        dist.ProcessGroup,
        process_group.ProcessGroupVariable,
        process_group.patches,
    ),
    Registration("device_mesh", DeviceMesh, device_mesh.DeviceMeshVariable, device_mesh.patches),
    Registration("placement", Placement, placement.PlacementVariable, placement.patches),
)


def active(config: DistConfig) -> tuple[Registration, ...]:
    """The trackers that ``config`` leaves on, in the order of ``TRACKERS``."""
    return tuple(entry for entry in TRACKERS if entry.name not in config.trackers_off)


def patches(config: DistConfig) -> list[Patch]:
    """Everything to apply, in order, for the trackers that are on; nothing is applied here."""
    entries = active(config)
    if not entries:
        return []
    return [
        *dynamo_trackers.retrack({entry.traced: entry.tracker for entry in entries}),
        *dynamo_guards.register_guards(),
        *dynamo_trackers.extend_builtins(),
        *classes_patches(),
        *creation.patches(),
        *dynamo_meshes.mesh_as_context(device_mesh.DeviceMeshVariable),
        *(patch for entry in entries for patch in entry.patches()),
    ]
