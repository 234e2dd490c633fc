"""Programs of ``unlike_worker.py`` that train by data parallelism, beside
DistributedDataParallel, on batches that differ.
"""

import copy

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from unlike_base import WIDTH, compiled, drawn


def mlp(depth, seed=0):
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*layers)


def sharded(model):
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def against_ddp(
    rank,
    batches,
    depth=2,
    accumulate=1,
    evaluate=False,
    wrap=DistributedDataParallel,
    rate=0.1,
    model=None,
    before=lambda step: None,
):
    """``batches``: (rows, rows, ...) of each step, by rank. Losses and parameters as DDP's,
    eager.
    """
    model = mlp(depth) if model is None else model
    reference = DistributedDataParallel(copy.deepcopy(model))
    ours = wrap(model)
    fast = compiled(ours)
    pairs = [(each, torch.optim.SGD(each.parameters(), rate)) for each in (reference, ours)]
    for step, rows in enumerate(batches):
        before(step)
        x = drawn(rows[rank], WIDTH, seed=10 * step + rank)
        losses = []
        for forward, (_, optimizer) in zip((reference, fast), pairs, strict=True):
            loss = (forward(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            losses.append(loss.item())
            if (step + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
        if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0]):
            return f"step {step}: loss {losses[1]}, with DDP {losses[0]}"
        if evaluate and rank == 0 and step % 10 == 3:
            with torch.no_grad():  # nothing is launched: each rank has the whole model
                one, other = fast(x[:3]), reference.module(x[:3])
            if not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                return f"step {step}: evaluation is off by {(one - other).abs().max():.3g}"
    for mine, theirs in zip(ours.parameters(), reference.parameters(), strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        if not torch.allclose(whole, theirs, rtol=1e-3, atol=1e-5):
            return "parameters differ from DDP's"
    return "ok"


def data_parallel(rank):
    return against_ddp(rank, [(16, 16), (24, 16)], depth=8)


def data_set(rank, left=(16, 7), **settings):
    """Five epochs of ten steps, the last of which has what is ``left`` of the data: less on rank
    1.
    """
    epoch = [(16, 16)] * 9 + [left]
    return against_ddp(rank, epoch * 5, **settings)


def data_set_last_batch_short(rank):
    return data_set(rank)


def data_set_sharded(rank):
    return data_set(rank, left=(7, 5), wrap=sharded)


def data_set_accumulated(rank):
    return data_set(rank, accumulate=2)


def data_set_evaluated_on_rank_0(rank):
    return data_set(rank, evaluate=True)


def data_set_in_buckets(rank):
    """Each rank draws a bucket of lengths for itself."""
    lengths = [(8, 24, 64)[at] for at in torch.randint(3, (100,), generator=torch.manual_seed(3))]
    return against_ddp(rank, [tuple(lengths[2 * at : 2 * at + 2]) for at in range(50)])
