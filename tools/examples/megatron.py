"""A Megatron-style block by hand, with c10d: torchrun --nproc-per-node 2 tools/examples/megatron.py

In backward the gradient of the input is summed over the ranks while that of the weight is computed:
the user's own overlap, with ``async_op=True`` and ``.wait()``, kept where it is written or later.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from shown import leave, show
from torch import nn

WIDTH, HIDDEN, TOKENS, LAYERS = 256, 1024, 128, 2


class ColumnParallel(torch.autograd.Function):
    """x [tokens, in] times this rank's columns [in, out / n]: [tokens, out / n]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight.t()
        work = dist.all_reduce(of_x, async_op=True)
        of_weight = x.t() @ gradient
        work.wait()
        return of_x, of_weight


class RowParallel(torch.autograd.Function):
    """x [tokens, in / n] times this rank's rows [in / n, out], summed over ranks: [tokens, out]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        y = x @ weight
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


class Block(nn.Module):
    """Norm, up, activation, down, residual; weights are this rank's shards."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        up, down = torch.randn(WIDTH, HIDDEN) / WIDTH**0.5, torch.randn(HIDDEN, WIDTH) / HIDDEN**0.5
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Parameter(up.chunk(size, 1)[rank].contiguous())
        self.down = nn.Parameter(down.chunk(size, 0)[rank].contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.gelu(ColumnParallel.apply(self.norm(x), self.up))
        return x + RowParallel.apply(hidden, self.down)


def main() -> None:
    """Build and compare."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the whole weights are the same on all ranks; each keeps its shard
    model = nn.Sequential(*(Block(rank, size) for _ in range(LAYERS)))
    leave(show(model, torch.randn(TOKENS, WIDTH), "Megatron-style blocks with async c10d"))


if __name__ == "__main__":
    main()
