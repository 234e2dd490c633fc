"""Small questions of the lowering that are answered while tracing, not traced."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist


def next_serial() -> int:
    """Another number for each launch of a graph; 0 in eager mode, where launches are never merged."""
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
    if (bound := getattr(group, "bound_device_id", None)) is not None:
        return bound
    types = {device.type for device in group._device_types}
    return accelerator if accelerator.type in types else torch.device("cpu")


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the group's backend makes one launch of a batch of sends and receives."""
    return type(group) is dist.ProcessGroup and group._get_backend(device).supports_coalescing
