"""One process of test_logs.py: a break, a plan, a collective that a kernel could have fused."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
x = DTensor.from_local(torch.ones(8, 16), mesh, [Shard(1)], run_check=False)
w = DTensor.from_local(torch.ones(16, 16), mesh, [Shard(0)], run_check=False)


@torch.compile(
    backend="dynamo_dist", options={"plan": "repair", "disable": ["scatter_by_exchange"]}
)
def step(x, w):
    y = (x @ w).redistribute(placements=[Shard(0)]).to_local()
    if y.sum() > 1e9:
        y = y + 1
    return y


step(x, w)
