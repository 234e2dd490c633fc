"""verify() called by every one of several gloo ranks; exits with 1 if one of them saw something
else.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dynamo_dist
from dynamo_dist.sharding import register_strategy
from dynamo_dist.sharding.rows import strategy
from inductor_passes.testing import leave_process


class Block(nn.Module):
    """Of two sharded weights and a norm that stays plain."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(F.gelu(self.up(self.norm(x))))


def parallel(block, mesh):
    return parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def trained(block, x):
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1, foreach=True)
    for _ in range(3):
        block(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(each).detach() for each in block.parameters()]


def doubling(schema):
    """Says that the sine of a sum is the sum of sines."""
    return strategy(lambda call: [call.row([Partial()], self=Partial())])(schema)


def report_of_tensor_parallel(mesh, x):
    return dynamo_dist.verify(parallel(Block(), mesh), [x])


def report_of_loss(mesh, x):
    one, other = (distribute_tensor(each, mesh, [Shard(0)]) for each in (x, x + 1))
    return dynamo_dist.verify(lambda a, b: F.mse_loss(a * 2, b), [one.requires_grad_(), other])


def report_of_planted(mesh, x):
    pending = DTensor.from_local(x / mesh.size(), mesh, [Partial()], run_check=False)
    return dynamo_dist.verify(torch.sin, [pending])


torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
x = torch.arange(32.0).view(4, 8).cos()
upstream = report_of_loss(mesh, x)
with dynamo_dist.enabled():
    right = [report_of_tensor_parallel(mesh, x), report_of_loss(mesh, x)]
    block = Block()
    expected = trained(copy.deepcopy(block), x)
    found = trained(parallel(block, mesh), x)
    register_strategy(torch.ops.aten.sin.default)(doubling)
    planted = report_of_planted(mesh, x)
seen = {
    "a tensor-parallel step and a loss are right": all(report.ok for report in right),
    "operators were compared": all(len(report.operators) > 3 for report in right),
    "upstream's loss is wrong": not upstream.ok and "mse_loss" in upstream.first.op,
    "its line is named": upstream.first is not None
    and "F.mse_loss(a * 2, b)" in upstream.first.line,
    "the planted strategy is found": not planted.ok and planted.first.op == "aten.sin.default",
    "foreach over DTensors and plain tensors": all(
        torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected, strict=True)
    ),
}
verdicts = [None] * dist.get_world_size()
dist.all_gather_object(verdicts, [name for name, held in seen.items() if not held])
print(f"rank {dist.get_rank()}: not seen {verdicts} {[str(report) for report in right]}")
leave_process(any(verdicts))
