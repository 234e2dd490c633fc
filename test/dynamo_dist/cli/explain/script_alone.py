"""A script that knows nothing of us: one process, an evil class name, a recompile, a crash."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)


def forward(self, x):
    y = torch.relu(x)
    dist.all_reduce(y)
    if y.sum() > 0:
        y = y + 1
    return y


Evil = type("<script>alert(1)</script>", (torch.nn.Module,), {"forward": forward})
assert __name__ == "__main__" and sys.argv[1:] in (["crash"], ["exit"])
model = torch.compile(Evil(), mode="default")
for length in (3, 4):
    model(torch.ones(length))
print("computed")
if sys.argv[1] == "crash":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(7)
