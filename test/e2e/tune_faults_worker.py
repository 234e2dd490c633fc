"""One rank of ``test_tune_faults.py``: the store of rank 1 alone fails at one step of a tuning, for a moment or for good.

Arguments: cases, each ``moment`` or ``good``, a colon, and a part of the keys that fail, or ``after>part`` once a key
with the part ``after`` was asked for. ``end`` and ``kill`` are for good and the last case of a job: rank 1 ends.
"""

import os
import re
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

import dynamo_dist
from dynamo_dist.tuning import report
from inductor_passes.agree import orders
from inductor_passes.attach import measured
from inductor_passes.testing import leave_process

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
wrong = []


class Faulty:
    """A store that fails ``times`` times for keys that hold ``part``, once one that holds ``after`` was asked for."""

    def __init__(self, store, after, part, times, kills):
        self.store, self.after, self.part = store, after, part
        self.left, self.kills, self.failed, self.keys = times, kills, 0, []

    def _look(self, keys):
        self.keys += keys
        on = not self.after or any(self.after in key for key in self.keys)
        if on and self.left > 0 and any(self.part in key for key in keys):
            self.left -= 1
            self.failed += 1
            if self.kills:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("connection reset by peer")

    def __getattr__(self, name):
        do = getattr(self.store, name)
        if name == "has_extended_api":
            return do

        def checked(keys, *rest):
            self._look([keys] if isinstance(keys, str) else keys)
            return do(keys, *rest)

        return checked


def forward(x, shards):
    for shard in shards:
        x = torch.relu(x @ funcol.all_gather_tensor(shard, 0, dist.group.WORLD))
    return x


torch.manual_seed(rank)
shards = [torch.rand(64 // ranks, 64) / 64 for _ in range(2)]
x = torch.rand(64, 64)
expected = forward(x, shards)


def run(number, case):
    way, _, part = case.partition(":")
    after, _, part = part.rpartition(">")
    os.environ[orders.SECONDS] = "60" if way == "moment" else "4"
    torch._dynamo.reset()
    orders.forget()
    measured.forget()
    job = orders.current()
    job._store = dist.PrefixStore(f"case{number}", job._store)
    faulty = None
    if rank == 1:
        times = 2 if way == "moment" else 10**9
        faulty = job._store = Faulty(job._store, after, part, times, way == "kill")
    compiled = torch.compile(forward, backend="dynamo_dist", fullgraph=True)

    def step():
        with torch.no_grad():
            if not torch.allclose(compiled(x, shards), expected):
                wrong.append(f"{case}: numbers")

    start = time.monotonic()
    try:
        found = dynamo_dist.tune(step, steps=3)
        said = found.decision
    except Exception as error:
        if rank == 0 and way not in (
            "end",
            "kill",
        ):  # where gloo says that the other rank has ended
            raise
        said = repr(error)
    if time.monotonic() - start > 60:
        wrong.append(f"{case}: took {time.monotonic() - start:.0f} s")
    if faulty is not None and not faulty.failed:
        wrong.append(f"{case}: nothing failed, of {faulty.keys}")
    if way == "moment":
        if said not in ("tuned", "put back"):
            wrong.append(f"{case}: {said}")
        both = [None] * ranks
        dist.all_gather_object(both, said)
        if len(set(both)) > 1:
            wrong.append(f"{case}: {both}")
        step()
    elif rank == 1:
        if not re.search(r"(TuneError|LostError|RanksDifferError).*job.{0,3}s store failed", said):
            wrong.append(f"{case}: {said}")
        try:
            step()
            wrong.append(f"{case}: a lost rank launches")
        except Exception as error:
            if "RanksDifferError" not in repr(error):
                wrong.append(f"{case}: {error!r}")
    elif way == "good" and said not in ("left", "tuned", "put back"):
        wrong.append(f"{case}: {said}")
    if way == "good" and rank == 0 and said == "left" and measured.adopted():
        wrong.append(f"{case}: left, and costs are adopted")


report.NOISE = 1e9  # what these steps take says nothing
for number, case in enumerate(sys.argv[1:]):
    run(number, case)
    if case.startswith(("end:", "kill:")):
        break
    dist.barrier()
if wrong:
    print(f"rank {rank}: {wrong}", flush=True)
if not sys.argv[-1].startswith(("end:", "kill:")):
    dist.barrier()  # rank 0 holds the store
leave_process(bool(wrong))
