"""One rank of ``test_two_hosts.py``: compiled training steps whose host may be slow at compiling.

Arguments: the slow host, how many seconds a pass takes longer there, and a cache folder for each of the steps.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import inductor_passes

slow_host, seconds, caches = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3:]
dist.init_process_group("gloo")
rank = dist.get_rank()
host = int(os.environ["GROUP_RANK"])


class Delay(inductor_passes.GraphPass):
    """Compiling takes this long on one host, and changes nothing."""

    name = "delay"

    def run(self, graph):
        if host == slow_host:
            time.sleep(seconds)
        return inductor_passes.PassStats(changed=False)


inductor_passes.register(Delay, before="schedule")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x = distribute_tensor(torch.randn(8, 16, dtype=torch.float64), mesh, [Shard(0)])
full = [torch.randn(16, 16, dtype=torch.float64) / 4 for _ in range(2)]
weights = [distribute_tensor(w, mesh, [Shard(0)]).requires_grad_() for w in full]


def through_tanh(x, weights):
    for w in weights:
        x = torch.tanh(x @ w.redistribute(placements=[Replicate()]))
    return x.square().sum()


def through_relu(x, weights):
    for w in weights:
        x = torch.relu(x @ w.redistribute(placements=[Replicate()]))
    return x.square().sum()


def gradients(function):
    return [g.full_tensor() for g in torch.autograd.grad(function(x, weights), weights)]


def outcome(step, cache):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch._dynamo.utils.counters.clear()
    expected = gradients(step)
    found = gradients(torch.compile(step, backend="dynamo_dist", fullgraph=True))
    return {
        "close": all(map(torch.allclose, found, expected)),
        "hits": torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"],
    }


steps = [
    outcome(step, cache) for step, cache in zip((through_tanh, through_relu), caches, strict=True)
]
print(json.dumps({"rank": rank, "host": host, "steps": steps}), flush=True)
dist.destroy_process_group()
