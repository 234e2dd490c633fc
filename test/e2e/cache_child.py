"""One process of test_caches.py: compile a tensor-parallel step in one state, print what
happened.
"""

import json
import sys

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import dynamo_dist
from inductor_passes.report import recorder
from inductor_passes.testing import fake_group

state = sys.argv[1]
added = []
foreach_add = torch._foreach_add_


def count(sums, addends):
    added.append(len(sums))
    foreach_add(sums, addends)


torch._foreach_add_ = count


def step(x, w, group):
    y = (x @ w).redistribute(placements=[Replicate()]).to_local()
    return torch.relu(y) * group.size()


def train(x, w):
    """Two steps, so that the second adds to what the first left; the gradient's sum."""
    fn = torch.compile(lambda x, w: (x @ w).square().sum().to_local(), backend="dynamo_dist")
    leaf = torch.nn.Parameter(w)
    for _ in range(2):
        fn(x, leaf).backward()
    return leaf.grad.to_local()


def train_sharded():
    """A layer sharded by FSDP2 over a half of the ranks and by tensor parallelism over the
    other; as ``train``.
    """
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layer = torch.nn.Sequential(torch.nn.Linear(16, 16))
    parallelize_module(layer, both["tp"], {"0": ColwiseParallel()})
    fully_shard(layer, mesh=both["dp"])
    fn = torch.compile(layer, backend="dynamo_dist")
    for _ in range(2):
        fn(torch.ones(8, 16)).square().sum().backward()
    return layer[0].weight.grad.to_local()


with fake_group(4):
    mesh = init_device_mesh("cpu", (4,))
    torch.manual_seed(0)
    x = DTensor.from_local(torch.randn(8, 16), mesh, [Shard(1)], run_check=False)
    w = DTensor.from_local(torch.randn(16, 16), mesh, [Shard(0)], run_check=False)
    backend = {"upstream": "inductor", "enabled": "dynamo_dist", "disabled": "inductor"}.get(state)
    if state == "disabled":
        dynamo_dist.enable()
        dynamo_dist.disable()
    with recorder.records_of_block() as records:
        if state == "training":
            out = train(x, w)
        elif state == "sharded":
            out = train_sharded()
        else:
            out = torch.compile(step, backend=backend, fullgraph=True)(x, w, dist.group.WORLD)
    print(
        json.dumps(
            {
                "added_at_once": sum(added),
                "hits": counters["aot_autograd"]["autograd_cache_hit"],
                "misses": counters["aot_autograd"]["autograd_cache_miss"],
                "records": [[r.phase, len(r.collectives), r.order_kept] for r in records],
                "checksum": out.double().sum().item(),
            }
        )
    )
