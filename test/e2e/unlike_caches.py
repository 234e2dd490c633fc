"""Programs of ``unlike_worker.py`` that find caches of another rank, damaged or lost ones, or
code that holds a coordinate.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from unlike_base import batch, cache_folder, compare, compiled, gather_then_reduce


def kept_files(folder):
    """What this package keeps beside Inductor's cache, if it does."""
    return [each for each in (folder / "inductor_passes").rglob("*") if each.is_file()]


def warm_start_without(rank, harm, on):
    folder = cache_folder(rank)
    step = gather_then_reduce()
    said = compare(step, [batch()])
    dist.barrier()
    torch._dynamo.reset()
    if rank in on:
        for file in kept_files(folder):
            harm(file)
    dist.barrier()
    return said if said != "ok" else compare(step, [batch()] * 2)


def record_lost_on_rank_0(rank):
    return warm_start_without(rank, Path.unlink, (0,))


def records_lost(rank):
    return warm_start_without(rank, Path.unlink, (0, 1))


def record_damaged_on_rank_1(rank):
    return warm_start_without(rank, lambda file: file.write_text('{"passes": [1]}'), (1,))


def records_of_nothing(rank):
    return warm_start_without(rank, lambda file: file.write_text("[]"), (0, 1))


def record_too_deep(rank):
    return warm_start_without(rank, lambda file: file.write_text("[" * 100_000), (0,))


def by_turns(rank, step, *inputs):
    """Rank 1 starts once rank 0 has compiled and run, with the same cache; returns its own
    result of both.
    """
    cache_folder(rank, shared=True)
    for turn in range(2):
        if turn == rank:
            found = compiled(step)(*inputs)
        dist.barrier()
    return found, step(*inputs)


def rows_of(rank, step, *inputs):
    found, expected = by_turns(rank, step, *inputs)
    if not torch.equal(found.to_local(), expected.to_local()):
        return f"rank {rank} has {found.to_local().tolist()}, not {expected.to_local().tolist()}"
    return "ok"


def whole_and_shard(rank):
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Replicate()])
    return whole, distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])


def coordinate_of_a_slice(rank):
    whole, _ = whole_and_shard(rank)
    return rows_of(rank, lambda s: s.redistribute(placements=[Shard(0)]) * 2, whole)


def coordinate_of_an_operand(rank):
    whole, shard = whole_and_shard(rank)
    return rows_of(rank, lambda x, s: x + s, shard, whole)


def coordinate_of_an_index(rank):
    """Rows are added to columns in shards: each rank adds its own columns of what all have."""
    mesh = init_device_mesh("cpu", (2,))
    columns = distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])
    index = distribute_tensor(torch.tensor([0, 3, 1]), mesh, [Replicate()])
    source = distribute_tensor(torch.arange(18.0).reshape(3, 6), mesh, [Replicate()])
    return rows_of(rank, lambda x, i, s: torch.index_add(x, 0, i, s), columns, index, source)


def coordinate_in_a_backward(rank):
    """The gradient of a gather is this rank's slice."""
    _, shard = whole_and_shard(rank)
    weight = torch.arange(8.0).reshape(4, 2)

    def step(x):
        x = x.detach().requires_grad_()
        whole = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        return torch.autograd.grad((whole * weight).sum(), x)[0]

    cache_folder(rank, shared=True)

    def forward(x):
        whole = x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Replicate()])
        return (whole * weight).sum()

    fast, x = compiled(forward), shard.detach().requires_grad_()
    loss = fast(x)
    expected = step(shard)
    for turn in range(2):
        if turn == rank:
            loss.backward()
        dist.barrier()
    same = torch.equal(x.grad.to_local(), expected.to_local())
    return "ok" if same else f"rank {rank} has {x.grad.to_local()}, not {expected.to_local()}"
