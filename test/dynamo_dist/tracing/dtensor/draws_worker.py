"""Compiled dropout on real gloo ranks: replicas equal, again in the backward and in a
checkpoint; exits with 1 if not.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import dynamo_dist
from inductor_passes.testing import leave_process

torch.set_num_threads(1)
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def dropped(x):
    return F.dropout(x, 0.5).sin()


def checkpointed(x):
    return checkpoint(dropped, x, use_reentrant=False)


def drawn(x):
    return torch.rand_like(x) * x + torch.bernoulli(x * 0.5)


PROGRAMS = [dropped, checkpointed, drawn]
LAYOUTS = [[Replicate(), Replicate()], [Shard(0), Replicate()], [Shard(0), Shard(1)]]


def wrong_dims(layout, *tensors):
    """The mesh dimensions along which these local tensors are replicas and differ."""
    found = []
    for name, placement in zip(mesh.mesh_dim_names, layout, strict=True):
        group = mesh.get_group(name)
        everywhere = [None] * group.size()
        dist.all_gather_object(everywhere, tensors, group=group)
        same = [torch.equal(a, b) for a, b in zip(everywhere[0], everywhere[-1], strict=True)]
        if isinstance(placement, Replicate) and not all(same):
            found.append(name)
    return found


failed = []
with dynamo_dist.enabled():
    for backend in ("aot_eager", "dynamo_dist"):
        for program in PROGRAMS:
            step = torch.compile(program, backend=backend, fullgraph=True)
            for layout in LAYOUTS:
                torch.manual_seed(7)
                x = distribute_tensor(torch.ones(8, 8), mesh, layout, src_data_rank=None)
                x = x.detach().requires_grad_()
                found = []
                for _ in range(2):
                    y, x.grad = step(x), None
                    y.to_local().sum().backward()
                    found += [y.to_local().detach(), x.grad.to_local()]
                label = f"{backend} {program.__name__} {layout}"
                if names := wrong_dims(layout, *found):
                    failed.append(f"{label}: replicas along {names}")
                if torch.equal(found[0], found[2]):
                    failed.append(f"{label}: the second call draws the same")
                masks = [each == 0 for each in found]
                if program is not drawn and not (
                    torch.equal(masks[0], masks[1]) and torch.equal(masks[2], masks[3])
                ):
                    failed.append(f"{label}: another mask in the backward")
verdicts = [None] * dist.get_world_size()
dist.all_gather_object(verdicts, failed)
print(f"rank {dist.get_rank()}: {verdicts}")
leave_process(any(verdicts))
