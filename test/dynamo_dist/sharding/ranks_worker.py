"""Losses and convolutions on real gloo ranks against one device; exits with 1 if a rank saw a
difference.
"""

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
        more = 0.5 if tensor.is_floating_point() else 0
        weight = rank + more if rank else 1 - sum(k + more for k in range(1, size))
        made = DTensor.from_local(tensor * weight, mesh, [placement], run_check=False)
    else:
        made = distribute_tensor(tensor, mesh, [placement], src_data_rank=None)
    return made.detach().requires_grad_(tensor.is_floating_point())


def whole(value):
    return value.redistribute(placements=[Replicate()]).to_local()


def gradients(result, inputs, cotangent):
    differentiable = [each for each in inputs if each.requires_grad]
    return torch.autograd.grad(result, differentiable, cotangent) if differentiable else ()


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False)


failed = []
count = 0
with dynamo_dist.enabled():
    for name, (function, tensors, layouts) in programs.items():
        leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in tensors]
        expected = function(*leaves)
        cotangent = torch.ones_like(expected).cumsum(0) if expected.ndim else torch.tensor(2.0)
        cotangent = cotangent.to(expected.dtype)
        wanted = gradients(expected, leaves, cotangent)
        for layout in layouts:
            inputs = [placed(t, p) for t, p in zip(tensors, layout, strict=True)]
            spread = distribute_tensor(cotangent, mesh, [Replicate()], src_data_rank=None)
            found = function(*inputs)
            results = [(found, *gradients(found, inputs, spread))]
            if not wanted:
                results.append((compiled(function)(*inputs),))
            for result in results:
                count += 1
                pairs = zip(result, (expected, *wanted), strict=True)
                if not all(torch.allclose(whole(a), b, rtol=1e-8, atol=1e-8) for a, b in pairs):
                    failed.append(f"{name} {layout}")
verdicts = [None] * dist.get_world_size()
dist.all_gather_object(verdicts, failed)
print(f"rank {dist.get_rank()} of {count} calls: differing {verdicts}")
leave_process(any(verdicts))
