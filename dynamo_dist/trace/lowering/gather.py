"""``all_gather`` into a tensor, into a list (of uneven sizes too), coalesced, and ``gather``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.trace.lowering.groups import Group, member, rank_in
from dynamo_dist.trace.lowering.work import (
    Finish,
    copy_back,
    end,
    only_wait,
    padded_back,
    payload,
    split_back,
)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """Concatenated or stacked: ``output_tensor`` has the elements of all ranks, in any shape."""
    here = member(group)
    return end(copy_back, [launch_all_gather(input_tensor, here)], [output_tensor], async_op)


def launch_all_gather(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """One all-gather in flight, along dimension 0."""
    sent = payload(tensor)
    if sent.dim() == 0:
        sent = sent.view(1)
    return torch.ops._c10d_functional.all_gather_into_tensor(sent, group.size(), group.group_name)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: Group = None,
    async_op: bool = False,
) -> dist.Work | None:
    """``dist.all_gather``: one flat launch; uneven sizes are padded to the longest."""
    here = member(group)
    sizes = [each.numel() for each in tensor_list]
    longest = max(sizes)
    finish: Finish
    if min(sizes) == longest:
        finish, sent = split_back, tensor
    else:  # every rank knows every size, so all of them pad alike
        flat = payload(tensor).view(-1)
        finish = padded_back
        width = longest * (2 if tensor.is_complex() else 1)
        sent = torch.nn.functional.pad(flat, (0, width - flat.numel()))
    return end(finish, [launch_all_gather(sent, here)], tensor_list, async_op)


def coalesced_all_gather(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Group, async_op: bool
) -> dist.Work | None:
    """One launch for several tensors, each gathered into a tensor of its own."""
    return end(copy_back, _launch_coalesced(inputs, member(group)), outputs, async_op)


def _launch_coalesced(inputs: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    flat = [payload(each).view(-1) for each in inputs]
    return list(
        torch.ops._c10d_functional.all_gather_into_tensor_coalesced(
            flat, group.size(), group.group_name
        )
    )


def all_gather_coalesced(
    output_tensor_lists: list[list[torch.Tensor]],
    input_tensor_list: list[torch.Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """``output_tensor_lists[rank][i]`` receives input ``i`` of that rank."""
    launched = _launch_coalesced(list(input_tensor_list), member(group))
    outputs = [
        output_tensor_lists[rank][i]
        for i in range(len(input_tensor_list))
        for rank in range(len(output_tensor_lists))
    ]
    work = end(split_each_back, launched, outputs, async_op)
    return work.get_future() if work is not None else None


def split_each_back(launched: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
    """Finish launches that each hold the elements of their share of the buffers, in order."""
    share = len(outputs) // len(launched)
    for i, each in enumerate(launched):
        split_back([each], outputs[i * share : (i + 1) * share])


def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> dist.Work | None:
    """``dist.gather``; ValueError for a list on the wrong ranks, as in eager mode."""
    here = member(group)
    if dst is None and group_dst is None:
        dst = 0
    root = rank_in(here, dst, group_dst)
    if here.rank() == root:
        if not gather_list:
            raise ValueError("Argument ``gather_list`` must be specified on destination rank.")
        like = [payload(each) for each in gather_list]
        launched = torch.ops.dynamo_dist.gather(payload(tensor), like, root, here.group_name)
        return end(copy_back, list(launched), gather_list, async_op)
    if gather_list:
        raise ValueError("Argument ``gather_list`` must NOT be specified on non-destination ranks.")
    launched = torch.ops.dynamo_dist.gather(payload(tensor), [], root, here.group_name)
    return end(only_wait, list(launched), [], async_op)
