"""FSDP2 on two gloo ranks within a memory budget, with code of an earlier job in the cache.

``unlike``: the second rank has fewer rows, which nothing was kept of, and chooses before the first.
"""

import sys

import torch
import torch.distributed as dist
from ranks_worker import local
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from whole_step import Gated, plain_step

from inductor_passes.ranks.decision import Orders
from inductor_passes.testing import leave_process

WIDTH, LAYERS = 32, 4
told = []  # what this rank would choose, and what it was told to


def told_by_the_second(orders, choice):
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.wait(["chosen"])
    told.append((choice.text, as_first_rank(orders, choice)))
    store.set("chosen", "")
    return told[-1][1]


as_first_rank = Orders.as_first_rank


def trained(rows, *, compiles):
    """Losses and parameters after two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Gated(WIDTH) for _ in range(LAYERS))).double()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in (*model, model):
        fully_shard(each, mesh=mesh)
    step = plain_step(model, torch.optim.SGD(model.parameters(), 0.1))
    if compiles:
        options = {"memory": "900KiB"}
        step = torch.compile(step, backend="dynamo_dist", fullgraph=True, options=options)
    generator = torch.Generator().manual_seed(1 + dist.get_rank())
    batches = [torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2)]
    return [*(step(x) for x in batches), *map(local, model.parameters())]


def main(job):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_unlike = job == "unlike"
    if is_unlike:
        Orders.as_first_rank = told_by_the_second
    rows = 64 if is_unlike and dist.get_rank() == 1 else 256
    want = trained(rows, compiles=False)
    found = trained(rows, compiles=True)
    torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-10)
    caches = counters["aot_autograd"]
    if job == "warm":
        assert caches["autograd_cache_hit"] == 1 and not caches["autograd_cache_miss"]
    if (
        is_unlike and dist.get_rank() == 0
    ):  # what its code from the cache has chosen is not followed
        own, agreed = told[0]
        assert own != agreed and caches["autograd_cache_hit"]
    leave_process()


main(*sys.argv[1:])
