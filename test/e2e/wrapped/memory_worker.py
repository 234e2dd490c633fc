"""One rank of ``test_memory``: the peak of live memory in a step, eager and compiled, with parameters freed between uses."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import dynamo_dist
from inductor_passes.testing import leave_process

# isort: off
from fsdp2_programs import sharded

LAYERS, WIDTH = 6, 256


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 64, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


def peak(call, model):
    """Bytes (of the allocator, above those before the step) at the most."""
    x = torch.randn(8, WIDTH)
    for _ in range(2):
        call(x).square().mean().backward()
        model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call(x).square().mean().backward()
    model.zero_grad()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


dist.init_process_group("gloo")
dynamo_dist.enable()
torch._inductor.config.fallback_by_default = True
base = Model()
eager, ours = (sharded()(copy.deepcopy(base)) for _ in range(2))
# Buckets hold several layers at once, within an allowance that is far above this model.
options = {"schedule": {"bucket": False, "extra_memory_bytes": 0, "extra_memory_ratio": 0.0}}
function = torch.compile(ours, backend="dynamo_dist", fullgraph=True, options=options)
of_eager, of_ours = peak(eager, eager), peak(function, ours)
print(of_eager, of_ours)
assert 0 < of_ours <= 1.05 * of_eager, (of_eager, of_ours)
leave_process()
