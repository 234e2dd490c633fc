"""One rank of ``test_split.py``: collective products in chunks and coalesced gathers in parts, beside eager mode."""

import sys

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as funcol

from inductor_passes.reporting import recorder
from inductor_passes.testing import leave_process

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
group = dist.group.WORLD


def step(x, w, v):
    rows = funcol.all_gather_tensor(x, 0, group)
    y = torch.relu(rows @ w)
    mine = funcol.reduce_scatter_tensor(y @ v, "sum", 0, group)
    return mine, funcol.all_reduce(mine @ w, "sum", group)


torch.manual_seed(rank)  # values are some tens of thousands
given = [torch.randn(512, 512), torch.randn(512, 512), torch.randn(512, 512)]
expected = step(*given)
records = []
unsubscribe = recorder.subscribe(records.append)
# Large enough that the shipped topology predicts a gain.
options = {"split": 2, "passes": ["chunk_products", "schedule"], "topology": "cpu-gloo"}
compiled = torch.compile(step, backend="dynamo_dist", fullgraph=True, options=options)
for _ in range(2):
    found = compiled(*given)
unsubscribe()
wrong = [f"value {i}" for i, (a, b) in enumerate(zip(found, expected, strict=True)) if not torch.allclose(a, b, rtol=1e-3, atol=0.5)]  # fmt: skip
launches = [len(r.collectives) for r in records]
wrong += [] if launches and launches[0] > 3 else [f"{launches} launches"]
wrong += [r.phase for r in records if r.order_kept is False]
verdicts = [None] * ranks
dist.all_gather_object(verdicts, (wrong, launches))
equal = len({str(its) for _, its in verdicts}) == 1
print(f"rank {rank}: {verdicts}", file=sys.stderr)
leave_process(not equal or any(bad for bad, _ in verdicts))
