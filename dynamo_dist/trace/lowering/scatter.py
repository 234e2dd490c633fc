"""``scatter`` and ``broadcast``: one rank's data for the others."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dynamo_dist.trace.lowering.groups import Group, member, rank_in
from dynamo_dist.trace.lowering.work import copy_back, end, payload


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> dist.Work | None:
    """``dist.broadcast``."""
    here = member(group)
    root = rank_in(here, src, group_src)
    launched = torch.ops._c10d_functional.broadcast(payload(tensor), root, here.group_name)
    return end(copy_back, [launched], [tensor], async_op)


def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> dist.Work | None:
    """``dist.scatter``; ValueError for a list on the wrong ranks, as in eager mode."""
    here = member(group)
    if src is None and group_src is None:
        src = 0
    root = rank_in(here, src, group_src)
    inputs: list[torch.Tensor] = []
    if here.rank() == root:
        if not scatter_list:
            raise ValueError("Argument ``scatter_list`` must be specified on source rank.")
        inputs = [payload(each) for each in scatter_list]
    elif scatter_list:
        raise ValueError("Argument ``scatter_list`` must NOT be specified on non-source ranks.")
    launched = torch.ops.dynamo_dist.scatter(inputs, payload(tensor), root, here.group_name)
    return end(copy_back, [launched], [tensor], async_op)
