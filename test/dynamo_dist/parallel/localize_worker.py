"""``localize`` beside the same module of DTensors on four gloo ranks; exits with 1 if they part.

Twenty compiled steps of AdamW with clipped gradients; a width that four ranks do not share evenly;
a replicated norm between shards of the sequence, whose gradients are partial sums. Then the state goes
through a checkpoint into a module of DTensors, and back.
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import dynamo_dist
from inductor_passes.testing import leave_process

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 10), nn.Linear(10, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def net(seed=0):
    torch.manual_seed(seed)
    return parallelize_module(
        Net(),
        mesh,
        {
            "": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=False
            ),
            "norm": SequenceParallel(use_local_output=True),
            "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
            "down": RowwiseParallel(),
        },
    )


def train(model, forward, clipped):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for step in range(20):
        x = torch.randn(2, 4, 8, generator=generator)
        loss = (forward(x) - 1).square().mean()
        loss.backward()
        if step % 2:  # gradients of two steps add up
            norm = nn.utils.clip_grad_norm_(clipped(model), 0.1)
            losses.append((loss.item(), norm.full_tensor().item()))
            optimizer.step()
            optimizer.zero_grad()
    return losses


def is_equal(a, b):
    return len(a) == len(b) and all(
        torch.allclose(a[name].full_tensor(), b[name].full_tensor(), rtol=1e-4, atol=1e-5)
        and a[name].placements == b[name].placements
        for name in b
    )


reference, localized = net(), dynamo_dist.localize(net())
expected = train(reference, reference, lambda model: model.parameters())
got = train(
    localized,
    torch.compile(localized, backend="dynamo_dist", fullgraph=True),
    lambda model: dynamo_dist.localized_dtensors(model).values(),
)
failed = [
    name
    for name, fine in {
        # Sums are taken in another order: float32 over twenty steps.
        "losses and norms": torch.allclose(torch.tensor(got), torch.tensor(expected), rtol=1e-4),
        "plain parameters": not any(isinstance(p, DTensor) for p in localized.parameters()),
        "weights": is_equal(localized.state_dict(), reference.state_dict()),
    }.items()
    if not fine
]

folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
dcp.save(localized.state_dict(), checkpoint_id=folder[0])
into_dtensors, into_localized = net(seed=1), dynamo_dist.localize(net(seed=2))
for model in (into_dtensors, into_localized):
    state = model.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    model.load_state_dict(state)
    if not is_equal(model.state_dict(), reference.state_dict()):
        failed.append(f"checkpoint into {type(model.up).__name__}")
into_dtensors.up.weight = nn.Parameter(
    into_dtensors.up.weight.detach().redistribute(placements=[Shard(1)])
)
into_localized.load_state_dict(into_dtensors.state_dict())  # from other placements
if not is_equal(into_localized.state_dict(), reference.state_dict()):
    failed.append("other placements")
into_localized.load_state_dict({k: v.full_tensor() for k, v in reference.state_dict().items()})
if not is_equal(into_localized.state_dict(), reference.state_dict()):
    failed.append("whole tensors")

verdicts = [None] * dist.get_world_size()
dist.all_gather_object(verdicts, failed)
print(f"rank {rank}: {verdicts}, last {got[-1]} and {expected[-1]}")
leave_process(any(verdicts))
