"""One rank of ``test_ranks.py``: programs in eager and with every placement re-solved, side by
side.

Double precision, so that what differs is a mistake. Four ranks.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from dynamo_dist.planning import repair
from dynamo_dist.planning.cost import prices_of
from inductor_passes.testing import leave_process

os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp())
dist.init_process_group("gloo")
rank = dist.get_rank()
line = init_device_mesh("cpu", (4,))
square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
WIDTH, HEADS, HIDDEN, BATCH, TOKENS = 16, 4, 32, 4, 8
COLUMN, ROW = ("q", "k", "v", "gate", "up"), ("o", "down")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norm_1, self.norm_2 = nn.RMSNorm(WIDTH, 1e-5), nn.RMSNorm(WIDTH, 1e-5)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.norm_1(x)
        q, k, v = (
            m(h).view(b, t, HEADS, WIDTH // HEADS).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        a = torch.softmax(q @ k.transpose(-1, -2) * 0.5, -1) @ v
        x = x + self.o(a.transpose(1, 2).reshape(b, t, WIDTH))
        h = self.norm_2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def placed(mesh, leading, module):
    """Megatron's placements of the weights alone."""
    torch.manual_seed(0)
    module = module.double()
    for path, parameter in list(module.named_parameters()):
        owner = path.split(".")[0]
        here = Shard(0) if owner in COLUMN else Shard(1) if owner in ROW else Replicate()
        spread = distribute_tensor(parameter.data.clone(), mesh, [*leading, here])
        module.get_submodule(owner)._parameters["weight"] = nn.Parameter(spread)
    return module


def data(mesh, placements):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=generator, dtype=torch.double)
    return distribute_tensor(x, mesh, placements).requires_grad_()


class Mixed(Block):
    """Redistributes of the user's own, a local region, and an in-place operation."""

    def forward(self, x):
        h = self.up(self.norm_1(x)).redistribute(placements=[Replicate()])
        h = h.sin().add_(1.0)
        local = h.redistribute(placements=[Shard(1)]).to_local() * 2
        back = DTensor.from_local(local, line, [Shard(1)])
        return self.down(back * h)


CASES = {
    "block, input replicated": (Block, line, (), [Replicate()]),
    "block, input sharded on the sequence": (Block, line, (), [Shard(1)]),
    "block, 2 x 2": (Block, square, (Replicate(),), [Shard(0), Replicate()]),
    "own redistributes": (Mixed, line, (), [Replicate()]),
}


def outcome(run, module, x):
    """The output's placements, and in full the output and every gradient."""
    module.zero_grad()
    x.grad = None
    out = run(x)
    out.full_tensor().square().mean().backward()
    grads = [p.grad.full_tensor() for p in (x, *module.parameters()) if p.grad is not None]
    return out.placements, [out.detach().full_tensor(), *grads]


failed = []
for name, (cls, mesh, leading, placements) in CASES.items():
    torch.compiler.reset()
    module, x = placed(mesh, leading, cls()), data(mesh, placements)
    where, expected = outcome(module, module, x)
    changes = []
    find = repair.find_plan

    def found(*args, find=find, changes=changes):
        plan = find(*args)
        changes.append(plan.changes)
        return plan

    repair.find_plan = found

    def backend(gm, inputs):
        return repair.compile_repaired(gm, inputs, aot_eager, prices_of("h100x8", inputs), "test")

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    for _ in range(2):
        there, got = outcome(compiled, module, x)
        same = len(got) == len(expected) and all(
            torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(expected, got, strict=True)
        )
        if there != where or not same or not changes or not changes[0]:
            failed.append(f"{name}: {there} {where} {same} {changes}")
    repair.find_plan = find
verdicts = [None] * dist.get_world_size()
dist.all_gather_object(verdicts, failed)
print(f"rank {rank} of {len(CASES)} programs: differing {verdicts}")
leave_process(any(verdicts))
