"""``all_reduce``, ``reduce``, ``reduce_scatter``: ``op`` is a name, such as "sum" (``ops.reduce_op_name``)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.trace.lowering.groups import Group, member, rank_in
from dynamo_dist.trace.lowering.ops import is_functional
from dynamo_dist.trace.lowering.work import copy_back, end, only_wait, payload, split_back


def all_reduce(
    tensor: torch.Tensor, op: str = "sum", group: Group = None, async_op: bool = False
) -> dist.Work | None:
    """``dist.all_reduce``."""
    name = member(group).group_name
    return end(copy_back, [launch_all_reduce(payload(tensor), op, name)], [tensor], async_op)


def launch_all_reduce(tensor: torch.Tensor, op: str, group_name: str) -> torch.Tensor:
    """One all-reduce in flight, of the reduce ops that torch has and of those it lacks."""
    if is_functional(op):
        return torch.ops._c10d_functional.all_reduce(tensor, op, group_name)
    return torch.ops.dynamo_dist.all_reduce(tensor, op, group_name)


def all_reduce_coalesced(
    tensors: Any, op: str = "sum", group: Group = None, async_op: bool = False
) -> Any:
    """``dist.all_reduce_coalesced``; a future if asynchronous, as in eager mode."""
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    work = coalesced_all_reduce(list(tensors), op, group, async_op)
    return work.get_future() if work is not None else None


def coalesced_all_reduce(
    tensors: list[torch.Tensor], op: str, group: Group, async_op: bool
) -> dist.Work | None:
    """One launch for several tensors."""
    name = member(group).group_name
    inputs = [payload(tensor) for tensor in tensors]
    if is_functional(op):
        launched = torch.ops._c10d_functional.all_reduce_coalesced(inputs, op, name)
    else:
        launched = [launch_all_reduce(each, op, name) for each in inputs]
    return end(copy_back, list(launched), tensors, async_op)


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> dist.Work | None:
    """``dist.reduce``: other ranks than ``dst`` keep their buffer."""
    here = member(group)
    root = rank_in(here, dst, group_dst)
    launched = torch.ops.dynamo_dist.reduce(payload(tensor), op, root, here.group_name)
    if here.rank() == root:
        return end(copy_back, [launched], [tensor], async_op)
    return end(only_wait, [launched], [], async_op)  # elsewhere the buffer stays as it is


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``dist.reduce_scatter_tensor``: ``input`` concatenated or stacked, in any shape."""
    here = member(group)
    flat = payload(input)
    if flat.dim() == 0 or flat.size(0) % here.size() != 0:
        flat = flat.view(-1)
    return end(copy_back, [launch_reduce_scatter(flat, op, here)], [output], async_op)


def launch_reduce_scatter(tensor: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    """One reduce-scatter in flight; dimension 0 is that of all ranks together."""
    if is_functional(op):
        return torch.ops._c10d_functional.reduce_scatter_tensor(
            tensor, op, group.size(), group.group_name
        )
    return torch.ops.dynamo_dist.reduce_scatter_tensor(tensor, op, group.size(), group.group_name)


def coalesced_reduce_scatter(
    outputs: list[torch.Tensor],
    inputs: list[torch.Tensor],
    op: str,
    group: Group,
    async_op: bool,
) -> dist.Work | None:
    """One launch for several tensors."""
    here = member(group)
    flat = [payload(each).view(-1) for each in inputs]
    if is_functional(op):
        launched = torch.ops._c10d_functional.reduce_scatter_tensor_coalesced(
            flat, op, here.size(), here.group_name
        )
    else:
        launched = [launch_reduce_scatter(each, op, here) for each in flat]
    return end(copy_back, list(launched), outputs, async_op)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: str = "sum",
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``dist.reduce_scatter`` of a list: one launch; uneven sizes are padded to the longest."""
    here = member(group)
    parts = [payload(each).view(-1) for each in input_list]
    longest = max([part.numel() for part in parts])
    rows = [
        part
        if part.numel() == longest
        else torch.nn.functional.pad(part, (0, longest - part.numel()))
        for part in parts
    ]
    launched = launch_reduce_scatter(torch.cat(rows), op, here)
    return end(split_back, [launched], [output], async_op)
