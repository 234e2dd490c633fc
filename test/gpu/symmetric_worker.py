"""One of two ranks that share a device: every operator on symmetric memory. Prints relative
errors as JSON.
"""

import json
import sys

import torch
import torch.distributed as dist

from inductor_passes.fused.kernels import register_operators, workspace
from inductor_passes.fused.kernels.availability import why_not

ops = torch.ops.inductor_passes
BF16 = torch.bfloat16


def of_rank(rank, *shape):
    generator = torch.Generator(device="cuda").manual_seed(rank)
    return torch.randn(*shape, generator=generator, device="cuda").to(BF16)


def error(got, wanted):
    return ((got.float() - wanted.float()).abs().max() / wanted.float().abs().max()).item()


def eager_calls(rank, world, group, found):
    for call in range(3):
        x = [of_rank(10 * call + r, 64, 512) for r in range(world)]
        w = of_rank(99, 512, 256) / 512**0.5
        total = x[0].float() + x[1].float()
        y, summed, *_ = ops.all_reduce_add_rmsnorm(x[rank], None, None, None, 1e-5, BF16, group)
        wanted = torch.nn.functional.rms_norm(total, (512,), eps=1e-5)
        found[f"all_reduce_add_rmsnorm {call}"] = max(error(y, wanted), error(summed, total))
        (c,) = ops.all_gather_matmul(x[rank], [w], [], "none", False, group, world)
        found[f"all_gather_matmul {call}"] = error(c, torch.cat(x).float() @ w.float())
        r = ops.matmul_reduce_scatter(x[rank], w, "sum", group, world)
        wanted = (total @ w.float()).view(world, 32, 256)[rank]
        found[f"matmul_reduce_scatter {call}"] = error(r, wanted)


def replayed_calls(rank, world, group, found):
    def doubled(t):
        return ops.all_reduce_add_rmsnorm(t, None, None, None, 1e-5, BF16, group)[1] * 2

    replayed = torch.compile(doubled, mode="reduce-overhead")
    for call in range(5):
        x = [of_rank(300 + 10 * call + r, 64, 512) for r in range(world)]
        wanted = 2 * (x[0].float() + x[1].float())
        found[f"replayed {call}"] = error(replayed(x[rank]).clone(), wanted)


def main():
    register_operators()
    dist.init_process_group("gloo")
    rank, world, group = dist.get_rank(), 2, dist.group.WORLD.group_name
    torch.cuda.set_device(0)
    assert why_not(group, "cuda") == "", why_not(group, "cuda")
    found = {}

    parts = [eager_calls, replayed_calls]
    for part in parts if sys.argv[1] == "eager" else reversed(parts):
        part(rank, world, group, found)
    workspace.raise_if_failed()
    print(json.dumps(found))
    dist.destroy_process_group()


main()
