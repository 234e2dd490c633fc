"""Peak of live memory in a step of FSDP2, eager and compiled, by shape of the model and number of
ranks.

The group is a fake one, which keeps no reference to what it is given: real ones drop theirs when a
thread gets to it, so that peaks differ from run to run, in eager mode too.

    python memory_worker.py blocks|linears prints a line for each model, and fails where compiled
    takes more
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

import dynamo_dist

MOST = 1.05


class Linears(nn.Module):
    """Parameters outweigh everything: a matrix a block."""

    def __init__(self, width=256, rows=8):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(6))
        self.head = nn.Linear(width, 64, bias=False)
        self.input = rows, width

    def forward(self, x):
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.head(x)


class Gated(nn.Module):
    """Five parameters of different sizes, as in a transformer's feed-forward layers."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.up, self.down = (
            nn.Linear(*sizes, bias=False)
            for sizes in ((width, 3 * width), (width, 3 * width), (3 * width, width))
        )

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


class Blocks(nn.Module):
    """Activations and parameters alike, by the number of rows."""

    def __init__(self, width=96, rows=64):
        super().__init__()
        self.embed = nn.Linear(32, width)
        self.blocks = nn.ModuleList(Gated(width) for _ in range(4))
        self.input = rows, 32

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


def sharded(model, **options):
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def peak(call, model):
    """Bytes (of the allocator, above those before the step) at the most."""
    x = torch.randn(model.input)
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


def main():
    dynamo_dist.enable()
    torch._inductor.config.fallback_by_default = sys.argv[1] == "linears"  # nothing to fuse there
    bf16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    more = []
    for ranks, name, base, options in (
        ((2, "linears", Linears(), {}), (64, "linears", Linears(), {}))
        if sys.argv[1] == "linears"
        else ((8, "few rows", Blocks(rows=8), {}), (64, "mixed precision", Blocks(rows=64), bf16))
    ):
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        eager, ours = (sharded(copy.deepcopy(base), **options) for _ in range(2))
        function = torch.compile(ours, backend="dynamo_dist", fullgraph=True)
        of_eager, of_ours = peak(eager, eager), peak(function, ours)
        share = of_ours / of_eager
        print(f"{ranks:3} ranks  {name:16} {of_eager:9} {of_ours:9}  {share:.2f}", flush=True)
        if not 0 < share <= MOST:
            more.append((ranks, name, share))
        torch._dynamo.reset()
        dist.destroy_process_group()
    assert not more, more


if __name__ == "__main__":
    main()
