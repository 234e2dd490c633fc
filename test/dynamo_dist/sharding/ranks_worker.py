"""Losses and convolutions on real gloo ranks against one device; exits with 1 if a rank saw a difference."""

import runpy
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

import dynamo_dist
from inductor_passes.testing import leave_process

torch.set_num_threads(1)
programs = runpy.run_path(str(Path(__file__).parent / "programs.py"))["PROGRAMS"]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),))


def placed(tensor, placement):
    if isinstance(placement, Partial):
        # Made of unequal summands: the first rank's is the rest.
        rank, size = dist.get_rank(), dist.get_world_size()
        weight = rank + 0.5 if rank else 1 - sum(k + 0.5 for k in range(1, size))
        made = DTensor.from_local(tensor * weight, mesh, [placement], run_check=False)
    else:
        made = distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    return made.detach().requires_grad_(tensor.is_floating_point())


def whole(value):
    return value.redistribute(placements=[Replicate()]).to_local()


failed = []
count = 0
with dynamo_dist.enabled():
    for name, (function, tensors, layouts) in programs.items():
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        expected = function(*leaves)
        cotangent = torch.ones_like(expected).cumsum(0) if expected.ndim else torch.tensor(2.0)
        cotangent = cotangent.to(expected.dtype)
        wanted = torch.autograd.grad(
            expected, [leaf for leaf in leaves if leaf.requires_grad], cotangent
        )
        for layout in layouts:
            inputs = [placed(t, p) for t, p in zip(tensors, layout, strict=True)]
            found = function(*inputs)
            gradients = torch.autograd.grad(
                found,
                [each for each in inputs if each.requires_grad],
                distribute_tensor(cotangent, mesh, [Replicate()], src_data_rank=None),
            )
            count += 1
            pairs = zip((found, *gradients), (expected, *wanted), strict=True)
            if not all(torch.allclose(whole(a), b, rtol=1e-8, atol=1e-8) for a, b in pairs):
                failed.append(f"{name} {layout}")
verdicts = [None] * dist.get_world_size()
dist.all_gather_object(verdicts, failed)
print(f"rank {dist.get_rank()} of {count} calls: differing {verdicts}")
leave_process(any(verdicts))
