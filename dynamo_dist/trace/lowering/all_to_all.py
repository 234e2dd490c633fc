"""``all_to_all`` of lists and ``all_to_all_single``, with even and uneven splits."""

from __future__ import annotations

import torch
import torch.distributed as dist

from dynamo_dist.trace.lowering.groups import Group, member
from dynamo_dist.trace.lowering.work import copy_back, end, payload, split_back


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``dist.all_to_all_single``; split sizes count rows of dimension 0, even ones are the default."""
    here = member(group)
    size = here.size()
    received = list(output_split_sizes or [output.size(0) // size] * size)
    sent = list(input_split_sizes or [input.size(0) // size] * size)
    launched = torch.ops._c10d_functional.all_to_all_single(
        payload(input), received, sent, here.group_name
    )
    return end(copy_back, [launched], [output], async_op)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``dist.all_to_all``: one flat launch, the tensors of each list may differ in size."""
    parts = [payload(each).view(-1) for each in input_tensor_list]
    received = [payload(each).numel() for each in output_tensor_list]
    launched = torch.ops._c10d_functional.all_to_all_single(
        torch.cat(parts), received, [part.numel() for part in parts], member(group).group_name
    )
    return end(split_back, [launched], output_tensor_list, async_op)
