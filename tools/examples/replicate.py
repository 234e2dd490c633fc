"""What DDP does, in the graph: torchrun --nproc-per-node 2 tools/examples/replicate.py

Every rank has all parameters; gradients are averaged in the backward graph, where the scheduler
merges them into buckets and hides them behind the rest of backward.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from shown import leave, show
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, LAYERS, BATCH = 256, 6, 64


def main() -> None:
    """Build and compare."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)]
    model = nn.Sequential(*layers)
    model = DistributedDataParallel(model)
    torch.manual_seed(1 + dist.get_rank())
    leave(show(model, torch.randn(BATCH, WIDTH), "replicas, gradients in buckets"))


if __name__ == "__main__":
    main()
