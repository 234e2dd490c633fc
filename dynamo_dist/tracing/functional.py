"""What functional collectives return, and questions that are answered while tracing.

The tensor of a graph has been waited for, so that a program that asks it to wait gets the tensor
itself.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import fx

from dynamo_dist.torch_compat import dtensor_specs, dynamo_building, dynamo_dtensors, dynamo_modules
from dynamo_dist.torch_compat.patching import Patch

if TYPE_CHECKING:
    from dynamo_dist.torch_compat import InstructionTranslatorBase, VariableTracker

_METHODS = ("trigger_wait", "wait")  # of AsyncCollectiveTensor


def _has_been_waited_for(tracker: Any) -> bool:
    """Return whether it tracks what a functional collective returned, or a view of that."""
    node = dynamo_building.realized(tracker).as_proxy().node
    wait = torch.ops._c10d_functional.wait_tensor
    value: Any
    base: Any
    while node.target not in (wait, wait.default):
        value = node.meta.get("example_value")
        of = node.args[0] if node.args else None
        base = of.meta.get("example_value") if isinstance(of, fx.Node) else None
        tensors = isinstance(value, torch.Tensor) and isinstance(base, torch.Tensor)
        if not tensors or not dtensor_specs.may_overlap(value, base):
            return False
        node = of
    return True


def _itself(
    tx: InstructionTranslatorBase, tracker: VariableTracker, args: VariableTracker
) -> object:
    return tracker if _has_been_waited_for(tracker) else None


def _has_attribute(tracker: VariableTracker, cls: type, name: str) -> bool | None:
    return True if name in _METHODS and _has_been_waited_for(tracker) else None


def _attribute(tx: InstructionTranslatorBase, tracker: VariableTracker, name: str) -> object:
    if name == "completed" and _has_been_waited_for(tracker):
        return dynamo_building.build(tx, True)
    return None


def patches() -> list[Patch]:
    """List the patches that enabling makes for what functional collectives return."""
    return [
        *(patch for name in _METHODS for patch in dynamo_modules.on_tensor_method(name, _itself)),
        *dynamo_dtensors.on_tensor_attributes(_has_attribute, _attribute),
    ]


Group = dist.ProcessGroup | None


def member(group: Group) -> dist.ProcessGroup:
    """The group itself; the default one for None."""
    return dist.group.WORLD if group is None else group  # type: ignore[return-value]


def rank_in(group: dist.ProcessGroup, global_rank: int | None, group_rank: int | None) -> int:
    """A root or peer as a rank of the group, given as either; ValueError for both or none."""
    if group_rank is not None:
        if global_rank is not None:
            raise ValueError("Can't specify both group_rank and global_rank")
        return group_rank
    if global_rank is None:
        raise ValueError("Must specify global_rank or group_rank")
    return dist.get_group_rank(group, global_rank)


def next_serial() -> int:
    """Another number for each launch of a graph; 0 in eager mode, where launches are never
    merged.
    """
    return 0


def seconds(timeout: timedelta | float | None) -> float:
    """A timeout in seconds; -1.0 for none."""
    if timeout is None:
        return -1.0
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def barrier_device(group: dist.ProcessGroup, device_ids: list[int] | None) -> torch.device:
    """Return the device on which eager's barrier of this group runs."""
    # A CUDA build names its accelerator on a machine without one too.
    accelerator = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device_ids:
        return torch.device(accelerator.type, device_ids[0])
    if group.bound_device_id is not None:
        return group.bound_device_id
    types = {device.type for device in group._device_types}
    return accelerator if accelerator.type in types else torch.device("cpu")


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the group's backend makes one launch of a batch of sends and receives."""
    return type(group) is dist.ProcessGroup and group._get_backend(device).supports_coalescing
