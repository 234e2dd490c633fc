"""One rank of ``test_split.py``: tensor parallel training in parts, beside eager mode."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from inductor_passes.report import recorder
from inductor_passes.testing import leave_process

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


def model():
    torch.manual_seed(0)
    made = nn.Sequential(Mlp(), Mlp())
    for block in made:
        parallelize_module(block, mesh, PLAN)
    return made


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def close(a, b):
    return torch.allclose(local(a), local(b), rtol=1e-4, atol=1e-4)


torch.manual_seed(1)
x = torch.randn(8, 16, 32)
eager, other = model(), model()
expected = eager(x)
expected.square().sum().backward()
records = []
unsubscribe = recorder.subscribe(records.append)
options = {"split": 2, "disable": ["merge_tiny"]}
compiled = torch.compile(other, backend="dynamo_dist", fullgraph=True, options=options)
for _ in range(2):
    other.zero_grad()
    got = compiled(x)
    got.square().sum().backward()
unsubscribe()
wrong = [
    name
    for (name, a), b in zip(eager.named_parameters(), other.parameters(), strict=True)
    if not close(a.grad, b.grad)
]
wrong += [] if close(expected, got) else ["output"]
cut = {r.phase: (r.split.parts, r.split.launches) for r in records if r.split is not None}
# Forward and backward were cut as one graph: both launch the parts, and what is saved stays in
# parts.
wrong += [] if cut == {"forward": (2, 3)} else [f"cut {cut}"]
launched = {r.phase: len(r.collectives) for r in records}
wrong += [] if launched == {"forward": 4, "backward": 2} else [f"launched {launched}"]
wrong += [r.phase for r in records if r.order_kept is False]
verdicts = [None] * ranks
dist.all_gather_object(verdicts, wrong)
print(f"rank {rank}: {verdicts}", file=sys.stderr)
leave_process(any(verdicts))
