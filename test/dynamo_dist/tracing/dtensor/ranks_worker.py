"""Programs eager against compiled on real gloo ranks; exits with 1 if a rank saw a difference."""

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

import dynamo_dist
from inductor_passes.testing import leave_process

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def full(*shape):
    generator = torch.Generator().manual_seed(7)
    return torch.randn(shape, generator=generator)


def sharded(requires_grad=False, on=mesh, placements=(Shard(0),), shape=(16, 8)):
    made = distribute_tensor(full(*shape), on, placements, src_data_rank=None)
    return made.requires_grad_(requires_grad)


def both(**kwargs):
    return sharded(on=grid, placements=(Shard(0), Shard(1)), **kwargs)


def loss(d, y):
    with loss_parallel():
        return F.cross_entropy(d, y)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
block = parallelize_module(Block(), mesh, plan)
labels = torch.arange(16) % 8

# name -> program, its arguments made anew for each run, and whether shapes are dynamic.
PROGRAMS = {
    "view": (lambda d: d.view(16, 2, 4)[:, 1].t(), lambda: (sharded(True),), False),
    "view, two mesh dimensions": (lambda d: d.transpose(0, 1), lambda: (both(),), False),
    "view that gathers": (lambda d: d[3], lambda: (sharded(True),), False),
    "input written to": (lambda d: (d.add_(1), d.t())[1], lambda: (sharded(),), False),
    "view of a partial": (
        lambda x: (
            DTensor.from_local(x * (rank + 1), mesh, [Partial()], run_check=False)
            .view(2, 4)
            .full_tensor()
        ),
        lambda: (full(8),),
        False,
    ),
    "strided shards": (
        lambda d: (d * 1).view(-1, 8) * 2,
        lambda: (both(requires_grad=True, shape=(4, 8, 8)),),
        False,
    ),
    "hasattr": (
        lambda d: d.full_tensor() if hasattr(d, "full_tensor") else d,
        lambda: (sharded(),),
        False,
    ),
    "scattered from the first rank": (
        lambda x: distribute_tensor(x, mesh, [Shard(0)]) * 2,
        lambda: (full(16, 8) * (rank + 1),),
        False,
    ),
    "scattered unevenly along the second dimension": (
        lambda x: distribute_tensor(x, mesh, [Shard(-1)]) + 1,
        lambda: (full(3, 10) * (rank + 1),),
        False,
    ),
    "scattered over two mesh dimensions": (
        lambda x: distribute_tensor(x, grid, [Shard(0), Shard(0)]) + 1,
        lambda: (full(7, 2) * (rank + 1),),
        False,
    ),
    "to a partial": (
        lambda x: distribute_tensor(x, mesh, [Partial()]).full_tensor(),
        lambda: (full(4) * (rank + 1),),
        False,
    ),
    "without placements": (
        lambda x: distribute_tensor(x, mesh) * 2,
        lambda: (full(4) * (rank + 1),),
        False,
    ),
    "broadcast from the first rank": (
        lambda x: distribute_tensor(x, mesh, [Replicate()]) * 2,
        lambda: (full(16, 8) * (rank + 1),),
        False,
    ),
    "uneven": (
        lambda x: distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None) + 1,
        lambda: (full(13, 8),),
        False,
    ),
    "factory": (
        lambda d: d + dt.ones(16, 8, device_mesh=mesh, placements=[Shard(0)]),
        lambda: (sharded(),),
        False,
    ),
    "constructor": (
        lambda d: DTensor(d._local_tensor * 2, d._spec, requires_grad=False).full_tensor(),
        lambda: (sharded(),),
        False,
    ),
    "loss": (loss, lambda: (sharded(True, placements=(Shard(1),)), labels), False),
    "block": (block, lambda: (full(4, 8),), False),
    "block, dynamic": (block, lambda: (full(5, 8),), True),
}


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def outcome(program, args):
    block.zero_grad()
    result = program(*args)
    found = [local(result).detach().clone()]
    if result.requires_grad:
        with loss_parallel():
            (result * 1).sum().backward() if result.ndim else result.backward()
        leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        # The layout of a gradient may differ from eager's; what it stands for may not.
        found += [
            whole(leaf.grad).clone()
            for leaf in (*leaves, *block.parameters())
            if leaf.grad is not None
        ]
    found += [local(a).detach().clone() for a in args if isinstance(a, torch.Tensor)]
    return found


failed = []
with dynamo_dist.enabled():
    for name, (program, make, dynamic) in PROGRAMS.items():
        torch.compiler.reset()
        expected = outcome(program, make())
        compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=dynamic)
        for _ in range(2):
            found = outcome(compiled, make())
            same = len(found) == len(expected) and all(
                a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
                for a, b in zip(expected, found, strict=True)
            )
            if not same:
                failed.append(name)
verdicts = [None] * dist.get_world_size()
dist.all_gather_object(verdicts, failed)
print(f"rank {rank} of {len(PROGRAMS)} programs: differing {verdicts}")
leave_process(any(verdicts))
