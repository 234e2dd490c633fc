"""One rank of ``test_channels.py``: clones made on all ranks or on none, and launches on them beside eager mode."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed import init_device_mesh

import dynamo_dist
import inductor_passes
from inductor_passes.errors import GroupError
from inductor_passes.graph import channels
from inductor_passes.reporting import recorder
from inductor_passes.testing import leave_process
from inductor_passes.torch_compat import c10d

os.environ["DYNAMO_DIST_AGREEMENT_SECONDS"] = "2"
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
group = mesh.get_group()
wrong = []


def refused(says):
    try:
        inductor_passes.clone_groups(mesh)
    except GroupError as error:
        return says in str(error)
    return False


# The last rank does not come in time; then it comes alone.
if rank < ranks - 1:
    wrong += [] if refused(f"rank {ranks - 1} did not come in time") else ["one rank missing"]
dist.barrier()
if rank == ranks - 1:
    wrong += [] if refused("did not come in time") else ["a late rank"]
dist.barrier()
os.environ["DYNAMO_DIST_AGREEMENT_SECONDS"] = "60"
inductor_passes.clone_groups(mesh)
inductor_passes.clone_groups(mesh)  # again: nothing
clone = channels.second(group.group_name)
wrong += [] if clone and c10d.group_ranks(clone) == tuple(range(ranks)) else [f"clone {clone}"]


def step(x, *shards):
    sums = []
    for shard in shards:
        whole = shard.new_empty(shard.shape[0] * ranks, shard.shape[1])
        dist.all_gather_into_tensor(whole, shard, group=group)
        x = torch.tanh(x @ whole)
        grad = x.t() @ x
        mine = torch.empty_like(shard)
        dist.reduce_scatter_tensor(mine, grad, group=group)
        sums.append(mine)
    return x, *sums


torch.manual_seed(rank)
given = [torch.randn(64, 64), *(torch.randn(64 // ranks, 64) for _ in range(4))]
expected = step(*given)
records = []
unsubscribe = recorder.subscribe(records.append)
options = {"channels": 2, "disable": ["merge_tiny"], "topology": "h100x8"}
options["schedule"] = {"bucket": False}
compiled = torch.compile(step, backend="dynamo_dist", fullgraph=True, options=options)
for _ in range(3):
    found = compiled(*given)
unsubscribe()
for i, (a, b) in enumerate(zip(found, expected, strict=True)):
    wrong += [] if torch.allclose(a, b, rtol=1e-4, atol=1e-4) else [f"value {i}"]
lanes = {span.lane for span in records[0].after.spans}
wrong += [] if clone in lanes and group.group_name in lanes else [f"lanes {lanes}"]
wrong += [r.phase for r in records if r.order_kept is False]
dynamo_dist.disable()
wrong += [] if channels.known() == {} else ["known after disable"]
again = compiled(*given)  # what was compiled goes on
wrong += [] if torch.allclose(again[0], expected[0], rtol=1e-4, atol=1e-4) else ["after disable"]
verdicts = [None] * ranks
dist.all_gather_object(verdicts, wrong)
dist.destroy_process_group()
verdicts += [] if channels.second(group.group_name) is None else ["known after destroy"]
print(f"rank {rank}: {verdicts}", file=sys.stderr)
leave_process(any(verdicts))
