"""``torch.distributed.nn.functional``: its autograd functions, traced as they stand.

Torch refuses these under compile and names another function. What they do is an autograd function
over c10d calls, and those trace.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.torch_compat.c10d import nn_function

_Broadcast, _Gather, _Scatter = (
    nn_function("Broadcast"),
    nn_function("Gather"),
    nn_function("Scatter"),
)
_Reduce, _ReduceScatter = nn_function("Reduce"), nn_function("Reduce_Scatter")
_AllGather = nn_function("AllGather")
_AlltoAll, _AlltoAllSingle = nn_function("AlltoAll"), nn_function("AlltoAllSingle")
_AllReduce = nn_function("AllReduce")


class AllGatherBase(torch.autograd.Function):
    """Gather into one tensor; the gradient is reduced and scattered.

    Torch's own raises in its backward for other backends, and a compiler traces a backward that the
    program may never run.
    """

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, input: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group, ctx.shape = group, input.shape
        dist.all_gather_into_tensor(output, input.contiguous(), group=group)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor, None]:
        result = torch.empty(ctx.shape, device=grad.device, dtype=grad.dtype)
        dist.reduce_scatter_tensor(result, grad.contiguous(), group=ctx.group)
        return None, result, None


def broadcast(tensor: torch.Tensor, src: int, group: Any = None) -> Any:
    """``torch.distributed.nn.functional.broadcast``, with gradients."""
    return _Broadcast.apply(src, group, tensor)


def gather(tensor: torch.Tensor, dst: int = 0, group: Any = None) -> Any:
    """``torch.distributed.nn.functional.gather``, with gradients."""
    return _Gather.apply(dst, group, tensor)


def scatter(tensors: list[torch.Tensor], src: int = 0, group: Any = None) -> Any:
    """``torch.distributed.nn.functional.scatter``, with gradients."""
    return _Scatter.apply(src, group, *tensors)


def reduce(tensor: torch.Tensor, dst: int, op: Any = None, group: Any = None) -> Any:
    """``torch.distributed.nn.functional.reduce``, with gradients."""
    return _Reduce.apply(dst, dist.ReduceOp.SUM if op is None else op, group, tensor)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = None,
    group: Any = None,
) -> Any:
    """``torch.distributed.nn.functional.reduce_scatter``, with gradients."""
    return _ReduceScatter.apply(dist.ReduceOp.SUM if op is None else op, group, output, *input_list)


def all_gather(tensor: torch.Tensor, group: Any = None) -> Any:
    """``torch.distributed.nn.functional.all_gather``, with gradients."""
    return _AllGather.apply(group, tensor)


def all_gather_base(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any = None
) -> Any:
    """``_all_gather_base``; its gradient works on every backend, torch's own on NCCL and XCCL
    only.
    """
    return AllGatherBase.apply(output_tensor, input_tensor, group)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: Any = None,
) -> Any:
    """``torch.distributed.nn.functional.all_to_all``, with gradients."""
    return _AlltoAll.apply(group, output_tensor_list, *input_tensor_list)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Any = None,
) -> Any:
    """``torch.distributed.nn.functional.all_to_all_single``, with gradients."""
    return _AlltoAllSingle.apply(group, output, output_split_sizes, input_split_sizes, input)


def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> Any:
    """``torch.distributed.nn.functional.all_reduce``, with gradients."""
    return _AllReduce.apply(dist.ReduceOp.SUM if op is None else op, group, tensor)
