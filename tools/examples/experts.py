"""A mixture of experts, a share of them on each rank: torchrun --nproc-per-node 2
tools/examples/experts.py

Tokens go to their expert's rank and back by ``all_to_all_single`` with equal capacities; gradients
take the same way through ``torch.distributed.nn.functional``.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functional
from shown import leave, show
from torch import nn

WIDTH, HIDDEN, TOKENS, EXPERTS, CAPACITY = 128, 256, 64, 4, 32


class Experts(nn.Module):
    """Each token to its best expert, at most ``CAPACITY`` tokens of this rank to each; others
    pass by.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.size = size
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        up, down = torch.randn(EXPERTS, WIDTH, HIDDEN), torch.randn(EXPERTS, HIDDEN, WIDTH)
        self.up = nn.Parameter(up.chunk(size)[rank] / WIDTH**0.5)
        self.down = nn.Parameter(down.chunk(size)[rank] / HIDDEN**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` [tokens of this rank, width]."""
        weight, expert = self.router(x).softmax(-1).max(-1)
        chosen = nn.functional.one_hot(expert, EXPERTS)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)  # in its expert's queue
        kept = (place < CAPACITY).to(x.dtype)
        at = nn.functional.one_hot(place.clamp(max=CAPACITY - 1), CAPACITY).to(x.dtype)
        slots = chosen.to(x.dtype)[:, :, None] * (at * kept[:, None])[:, None, :]
        queues = torch.einsum("tec,tw->ecw", slots, x).contiguous()
        came = dist_functional.all_to_all_single(torch.empty_like(queues), queues)
        # From every rank, for each expert of this rank.
        mine = came.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1, 2)
        worked = torch.relu(mine @ self.up) @ self.down
        back = worked.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
        returned = dist_functional.all_to_all_single(torch.empty_like(back), back)
        return x + weight[:, None] * torch.einsum("tec,ecw->tw", slots, returned)


def main() -> None:
    """Build and compare."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Experts(rank, size)
    torch.manual_seed(1 + rank)
    leave(show(model, torch.randn(TOKENS, WIDTH), "mixture of experts, all_to_all"))


if __name__ == "__main__":
    main()
