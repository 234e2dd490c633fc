"""One rank of ``test_two_hosts.py``: compiled training steps whose host may be slow at compiling,
or that one rank compiles for both.

Arguments: ``shared``, or the slow host and how many seconds a pass takes longer there; and a cache
folder for each of the steps.
"""

import json
import os
import sys
import time

import torch
import torch.distributed as dist
from torch._inductor.graph import GraphLowering
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import inductor_passes

shares = sys.argv[1] == "shared"
slow_host, seconds = (0, 0.0) if shares else (int(sys.argv[1]), float(sys.argv[2]))
caches = sys.argv[2:] if shares else sys.argv[3:]
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


if not shares:  # a pass of a user's may ask for its rank
    inductor_passes.register(Delay, before="schedule")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
x = distribute_tensor(torch.randn(8, 16, dtype=torch.float64), mesh, [Shard(0)])
full = [torch.randn(16, 16, dtype=torch.float64) / 4 for _ in range(2)]
weights = [distribute_tensor(w, mesh, [Shard(0)]).requires_grad_() for w in full]
sides = [distribute_tensor(w, mesh, [Shard(1 - i)]).requires_grad_() for i, w in enumerate(full)]
lowered: list[object] = []
lower = GraphLowering.compile_to_module


def counted(self):
    lowered.append(self)
    return lower(self)


GraphLowering.compile_to_module = counted


def through_tanh(x, weights):
    for w in weights:
        x = torch.tanh(x @ w.redistribute(placements=[Replicate()]))
    return x.square().sum()


def through_relu(x, weights):
    for w in weights:
        x = torch.relu(x @ w.redistribute(placements=[Replicate()]))
    return x.square().sum()


def beside_each_other(x, sides):
    one, other = sides
    y = x.redistribute(placements=[Replicate()])
    return (torch.sin(y @ one) @ other).full_tensor().square().sum()


def beside_each_other_twice(x, sides):
    one, other = sides
    y = x.redistribute(placements=[Replicate()])
    return (torch.cos(torch.sin(y @ one)) @ other).full_tensor().square().sum()


def gradients(function):
    taken = sides if shares else weights
    return [g.full_tensor() for g in torch.autograd.grad(function(x, taken), taken)]


def outcome(step, cache):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    torch._dynamo.utils.counters.clear()
    lowered.clear()
    expected = gradients(step)
    options = {"compile": "shared"} if shares else {}
    found = gradients(torch.compile(step, backend="dynamo_dist", fullgraph=True, options=options))
    return {
        "close": all(map(torch.allclose, found, expected)),
        "lowered": len(lowered),
        "hits": torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"],
    }


STEPS = (beside_each_other, beside_each_other_twice) if shares else (through_tanh, through_relu)
steps = [outcome(step, cache) for step, cache in zip(STEPS, caches, strict=True)]
print(json.dumps({"rank": rank, "host": host, "steps": steps}), flush=True)
dist.destroy_process_group()
