"""One rank of ``test_rewrites.py``: a program in which every rewrite finds something, eager and
compiled.
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from inductor_passes.report import recorder
from inductor_passes.testing import leave_process

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
WHOLE = [Replicate()]


def program(x, w, row):
    columns = x.redistribute(placements=WHOLE).redistribute(placements=[Shard(1)])
    rows = (x.t() @ x).redistribute(placements=WHOLE).redistribute(placements=[Shard(0)])
    wide = w.float().redistribute(placements=WHOLE).to_local()
    turned = w.t().redistribute(placements=WHOLE).to_local()
    narrow = rows.redistribute(placements=WHOLE).to_local().bfloat16()
    norms = [(row * row).sum().full_tensor(), (row + 1).sum().full_tensor()]
    return columns.to_local() * 2, rows.to_local() * 2, wide @ wide.t(), turned + 1, narrow, *norms


def spread(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sum(shape))
    whole = torch.randn(*shape, generator=generator).to(dtype)
    return distribute_tensor(whole, mesh, [Shard(0)])


inputs = (spread(16, 8), spread(8, 12, dtype=torch.bfloat16), spread(16))
with torch.no_grad():
    expected = program(*inputs)
    records = []
    unsubscribe = recorder.subscribe(records.append)
    got = torch.compile(program, backend="dynamo_dist", fullgraph=True)(*inputs)
    unsubscribe()
changed = {p.name for record in records for p in record.passes if p.changed}
wanted = {
    "all_reduce_slice",
    "compose_redistributes",
    "gather_before_upcast",
    "merge_tiny",
    "scatter_by_exchange",
}
missing = sorted(wanted - changed)
wrong = [
    i
    for i, (a, b) in enumerate(zip(expected, got, strict=True))
    if a.shape != b.shape or not torch.allclose(a.float(), b.float(), rtol=1e-5, atol=1e-5)
]
verdicts = [None] * ranks
dist.all_gather_object(verdicts, (wrong, missing))
print(f"rank {rank}: {verdicts}, changed {sorted(changed)}")
leave_process(any(wrong or missing for wrong, missing in verdicts))
