"""One rank of ``test_tune.py``: a step that is tuned, with rank 1 slower by a third inside of its graph; then steps that cannot be."""

import time

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

import dynamo_dist
from dynamo_dist.errors import TuneError
from dynamo_dist.tuning import codes
from inductor_passes.attach import measured
from inductor_passes.testing import leave_process

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
SLOW_S, WIDTH = 0.03, 64


@torch.library.custom_op("tune_worker::late", mutates_args=())
def late(x: torch.Tensor) -> torch.Tensor:
    time.sleep(SLOW_S * (1 + rank / 3))
    return x.clone()


@late.register_fake
def _(x):
    return torch.empty_like(x)


def forward(x, shards):
    for shard in shards:
        x = torch.relu(late(x) @ funcol.all_gather_tensor(shard, 0, dist.group.WORLD))
    return x


torch.manual_seed(rank)
shards = [torch.rand(WIDTH // ranks, WIDTH) / WIDTH for _ in range(3)]
x = torch.rand(WIDTH, WIDTH)
expected = forward(x, shards)
with torch.no_grad():
    compiled = torch.compile(forward, backend="dynamo_dist", fullgraph=True)
calls, wrong = [], []


def step():
    calls.append(1)
    if not torch.allclose(compiled(x, shards), expected):
        wrong.append(f"step {len(calls)}")


def same(value):
    found = [None] * ranks
    dist.all_gather_object(found, value)
    return all(each == found[0] for each in found)


report = dynamo_dist.tune(step, steps=6)
if report.decision not in ("tuned", "put back"):
    wrong.append(f"decision {report}")
if set(report.slow) != {1} or not 1.2 < report.slow[1] < 1.5:
    wrong.append(f"slow {report.slow}")
if not 12 <= len(calls) <= 18:
    wrong.append(f"{len(calls)} calls")
if report.recompiles > 2 or not report.recompiles:
    wrong.append(f"{report.recompiles} recompiles")
if not same((report.decision, report.before_us, report.after_us)):
    wrong.append("ranks decided otherwise")
if not same(sorted(times.digest for times in measured.adopted().values())):
    wrong.append("ranks have other tables")
if report.decision == "tuned" and not measured.adopted():
    wrong.append("nothing adopted")
step()
left = [n for each in codes._noted for n in each.call.__func__.__globals__ if "clock" in n]
if left:
    wrong.append(f"left in the code: {left}")

for bad in (0, -1, 2.5, True):
    try:
        dynamo_dist.tune(step, steps=bad)
        wrong.append(f"steps={bad} was taken")
    except TuneError:
        pass

before = sorted(times.digest for times in measured.adopted().values())


def breaks():
    step()
    if rank == 1:
        raise KeyError("of rank 1")


try:
    found = dynamo_dist.tune(breaks, steps=2)
    if rank == 1 or found.decision != "left" or "KeyError" not in found.why:
        wrong.append(f"a step that breaks: {found}")
except KeyError:
    if rank != 1:
        wrong.append("raised on rank 0")
found = dynamo_dist.tune(lambda: x @ x, steps=2)
if found.decision != "left" or "no compiled graph" not in found.why:
    wrong.append(f"a step without launches: {found}")
if sorted(times.digest for times in measured.adopted().values()) != before:
    wrong.append("a tuning that failed changed the costs")
if wrong:
    print(f"rank {rank}: {wrong}", flush=True)
dist.barrier()  # rank 0 holds the store
leave_process(bool(wrong))
