"""``barrier`` and ``monitored_barrier``: launches with nothing to give but their end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.trace.lowering.groups import Group, member
from dynamo_dist.trace.lowering.state import barrier_device, next_serial, seconds
from dynamo_dist.trace.lowering.work import end, only_wait


def barrier(
    group: Group = None,
    async_op: bool = False,
    device_ids: list[int] | None = None,
    timeout: timedelta | None = None,
) -> dist.Work | None:
    """``dist.barrier``; a launch without data, which no pass may drop."""
    here = member(group)
    token = torch.ops.dynamo_dist.barrier(
        barrier_device(here, device_ids),
        device_ids or [],
        seconds(timeout),
        here.group_name,
        next_serial(),
    )
    return end(only_wait, [token], [], async_op)


def monitored_barrier(
    group: Group = None, timeout: Any = None, wait_all_ranks: bool = False
) -> None:
    """``dist.monitored_barrier``, gloo only; synchronous, as in eager mode."""
    token = torch.ops.dynamo_dist.monitored_barrier(
        seconds(timeout), wait_all_ranks, member(group).group_name, next_serial()
    )
    only_wait([token], [])
