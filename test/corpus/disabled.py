"""``run.py --plugin disabled``: the plugin enabled, used and disabled again, which must leave upstream torch.

    python run.py --plugin disabled --out after.jsonl && python compare.py upstream_2.13.0.jsonl after.jsonl
"""
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

import common
import dynamo_dist


def used(d, x):
    work = dist.all_reduce(x, async_op=True)
    y = d.redistribute(placements=[Replicate()]).to_local()
    work.wait()
    return y + x.sum() + common.SUB.size()


def enable():
    dynamo_dist.enable()
    torch.compile(used, backend="aot_eager", fullgraph=True)(common.D((16, 8), [common.Shard(0)]), common.T(4))
    dynamo_dist.disable()
    torch._dynamo.reset()
