"""One rank of ``test_by_itself.py``: a program with ``costs="measured"``, which is tuned while it runs, or starts tuned.

Argument: ``first`` or ``second`` job.
"""

import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from dynamo_dist.tuning import by_itself, codes, report
from inductor_passes.attach import measured
from inductor_passes.reporting import recorder
from inductor_passes.testing import leave_process

report.NOISE = 1e9  # what these steps take says nothing
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
first = sys.argv[1] == "first"
wrong, records = [], []
recorder.subscribe(records.append)


def loss(x, shards):
    for shard in shards:
        x = torch.relu(x @ funcol.all_gather_tensor_autograd(shard, 0, dist.group.WORLD))
    return x.sum()


torch.manual_seed(rank)
shards = [(torch.rand(64 // ranks, 64) / 64).requires_grad_() for _ in range(3)]
x = torch.rand(64, 64)
loss(x, shards).backward()
expected = [shard.grad.clone() for shard in shards]
compiled = torch.compile(loss, backend="dynamo_dist", options={"costs": "measured"}, fullgraph=True)


def step():
    for shard in shards:
        shard.grad = None
    compiled(x, shards).backward()
    if not all(torch.allclose(s.grad, e) for s, e in zip(shards, expected, strict=True)):
        wrong.append("numbers")


def same(value):
    found = [None] * ranks
    dist.all_gather_object(found, value)
    return all(each == found[0] for each in found)


compiles = []
for _ in range(45):
    before = codes.compiles()
    start = time.perf_counter()
    step()
    if codes.compiles() > before:
        compiles.append(time.perf_counter() - start)
found = by_itself.report()
if first:
    if found is None or found.decision != "tuned":
        wrong.append(f"report {found}")
    elif found.recompiles != 1 or not 0 < found.recompile_s <= max(compiles):
        wrong.append(
            f"{found.recompiles} recompiles took {found.recompile_s}, and steps {compiles}"
        )
    elif not same((found.before_us, found.after_us, found.decision)):
        wrong.append("ranks report otherwise")
    if len(compiles) != 2:
        wrong.append(f"{len(compiles)} steps compiled")
    if not same(sorted(t.digest for t in measured.adopted().values())) or not measured.adopted():
        wrong.append("ranks have other tables")
else:
    if found is not None or len(compiles) != 1:
        wrong.append(f"the second job tunes: {found}, {len(compiles)} steps compiled")
    if not records or not all(record.is_measured for record in records):
        wrong.append(f"scheduled by {[record.topology for record in records]}")
left = [n for each in codes._noted for n in each.call.__func__.__globals__ if "clock" in n]
if left or (first and by_itself._running):
    wrong.append(f"left in the code: {left}")
if wrong:
    print(f"rank {rank}: {wrong[:5]}", flush=True)
dist.barrier()  # rank 0 holds the store
leave_process(bool(wrong))
