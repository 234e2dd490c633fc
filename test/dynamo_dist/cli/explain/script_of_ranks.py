"""A script that knows nothing of us: two ranks, of which one differs and may fail.

Started by torchrun, or as ``spawn`` by itself.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh


def main(rank, store=None):
    how = {"rank": rank, "world_size": 2, "init_method": f"file://{store}"} if store else {}
    dist.init_process_group("gloo", **how)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    weight = distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)])

    @torch.compile
    def layer(x, w):
        y = torch.relu(x @ w.redistribute(placements=[Replicate()]).to_local())
        if rank == 1:
            print("only rank 1 breaks")
        return y + 1

    assert layer(torch.ones(4, 64), weight).sum().item() == 65 * 4 * 64
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # a gloo thread that drops its tensor while Python ends aborts the process
    if "fail" in sys.argv and rank == 1:
        raise ValueError("rank 1 fails")


if __name__ == "__main__":
    if sys.argv[1] == "spawn":
        torch.multiprocessing.spawn(main, args=(sys.argv[2],), nprocs=2)
    else:
        main(int(os.environ["RANK"]))
