"""The ops of ``torch.ops._c10d_functional`` that write to an argument, launched as functional ones.

AOTAutograd refuses an op whose result is its argument. The argument is in flight until the program
calls ``wait_tensor`` on it: ``work_tracker.traced_wait_tensor`` ends the launch there.
"""

from __future__ import annotations

import torch

from dynamo_dist.tracing.work import copy_back, start


def all_reduce_(input: torch.Tensor, reduce_op: str, group_name: str) -> torch.Tensor:
    """``all_reduce_``: the argument, in flight."""
    launched = torch.ops._c10d_functional.all_reduce(input, reduce_op, group_name)
    start(copy_back, [launched], [input])
    return input


def all_reduce_coalesced_(
    inputs: list[torch.Tensor], reduce_op: str, group_name: str
) -> list[torch.Tensor]:
    """``all_reduce_coalesced_``: the arguments, in flight, each with a wait of its own."""
    launched = torch.ops._c10d_functional.all_reduce_coalesced(inputs, reduce_op, group_name)
    for each, buffer in zip(launched, inputs):  # noqa: B905
        start(copy_back, [each], [buffer])
    return inputs


def broadcast_(input: torch.Tensor, src: int, group_name: str) -> torch.Tensor:
    """``broadcast_``: the argument, in flight. ``src`` is a rank of the group."""
    launched = torch.ops._c10d_functional.broadcast(input, src, group_name)
    start(copy_back, [launched], [input])
    return input


def all_gather_into_tensor_out(
    input: torch.Tensor, group_size: int, group_name: str, *, out: torch.Tensor
) -> torch.Tensor:
    """``all_gather_into_tensor_out``: ``out``, in flight."""
    launched = torch.ops._c10d_functional.all_gather_into_tensor(input, group_size, group_name)
    start(copy_back, [launched], [out])
    return out


def reduce_scatter_tensor_out(
    input: torch.Tensor, reduce_op: str, group_size: int, group_name: str, *, out: torch.Tensor
) -> torch.Tensor:
    """``reduce_scatter_tensor_out``: ``out``, in flight."""
    launched = torch.ops._c10d_functional.reduce_scatter_tensor(
        input, reduce_op, group_size, group_name
    )
    start(copy_back, [launched], [out])
    return out
