"""Small models of the programs: few parameters, because each is traced with its gather and its
reduction.
"""

import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8


class Block(nn.Module):
    def __init__(self, hidden=4):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    """Blocks, and a parameter of the root's own."""

    def __init__(self, block=Block, blocks=1, out=4):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, out, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recomputes(Net):
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def uneven():
    """Five rows are 3 and 2, or 2, 2, 1 and none; of three the last of four ranks has none
    either.
    """
    return Net(lambda: Block(5), out=3)
