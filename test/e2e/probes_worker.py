"""One rank of ``test_probes.py``: ranks plan probes and launch them, alike, unlike, and while the store of rank 1 fails in between."""

import os
import re

import torch
import torch.distributed as dist

import dynamo_dist
from dynamo_dist.tuning import session
from dynamo_dist.tuning.meetings import LostError, StoppedError
from inductor_passes.agree import orders
from inductor_passes.records import CollectiveRecord, NodeRecord
from inductor_passes.testing import leave_process
from inductor_passes.tuning import probes

dynamo_dist.enable()
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
wrong = []
GROUP = dist.group.WORLD.group_name


class Faulty:
    """A store that fails ``times`` times for keys that hold ``part``."""

    def __init__(self, store, part, times):
        self.store, self.part, self.left, self.failed = store, part, times, 0

    def __getattr__(self, name):
        do = getattr(self.store, name)
        if name == "has_extended_api":
            return do

        def checked(keys, *rest):
            here = [keys] if isinstance(keys, str) else keys
            if self.left > 0 and any(self.part in key for key in here):
                self.left, self.failed = self.left - 1, self.failed + 1
                raise RuntimeError("connection reset by peer")
            return do(keys, *rest)

        return checked


class Record:
    """What probes read of a graph's record."""

    def __init__(self, kinds, payload):
        self.collectives = [
            CollectiveRecord(k, k, GROUP, ranks, payload, "float32", None, "", 1.0, 0.0, 0.0)
            for k in kinds
        ]
        self.nodes = [NodeRecord(k, "launch", k, 1.0, i, hosts=1) for i, k in enumerate(kinds)]


KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")


def run(number, part="", times=0, payload=1 << 20):
    os.environ[orders.SECONDS] = "4" if times > 9 else "60"
    orders.forget()
    job = orders.current()
    faulty = job._store = Faulty(
        dist.PrefixStore(f"case{number}", job._store), part, times if rank == 1 else 0
    )
    tuning = session._Tuning(job, lambda: None, 1, f"probes/{number}")
    launched, stock = [], probes.launch_of
    probes.launch_of = lambda kind, *what: launched.append(kind) or stock(kind, *what)
    spans = {}
    try:
        planned = tuning._planned(probes.wanted([Record(KINDS, payload)]))
        spans = tuning._probed(planned)
        said = f"planned {len(planned)}"
    except (StoppedError, LostError) as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        probes.launch_of = stock
    if rank == 1 and bool(times) != bool(faulty.failed):
        wrong.append(f"case {number}: {faulty.failed} failures")
    return said, launched, spans


def expect(number, found, wanted, launches):
    said, launched, spans = found
    if not re.match(wanted, said) or len(launched) != launches or len(spans) != launches:
        wrong.append(f"case {number}: {found}")


expect(0, run(0), "planned 4", 4)
expect(1, run(1, payload=(1 + 7 * rank) << 20), "planned 0", 0)
for number, part in enumerate(("probes/of", "probes/word", "probes/all", "/step"), 2):
    expect(number, run(number, part, times=2), "planned 4", 4)
for number, part in enumerate(("probes/of", "probes/word", "probes/all", "/step 0/of"), 6):
    expect(number, run(number, part, times=10**9), ("StoppedError", "LostError")[rank], 0)
    dist.barrier()
a, b = ([torch.ones(2)] * 2, torch.ones(2))
dist.all_gather(a, b)  # the groups are as they were
if wrong:
    print(f"rank {rank}: {wrong}", flush=True)
dist.barrier()  # rank 0 holds the store
leave_process(bool(wrong))
