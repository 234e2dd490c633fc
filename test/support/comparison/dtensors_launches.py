"""Collectives and random numbers asked of DTensors in eager mode: right, or refused."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparison.program import draw, on_mesh
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

# Of threads, a group gets the DTensor itself, and what torch keeps for a process is kept for all of
# them.
GLOO = ("gloo",)


def _mine(rank, *shape):
    return draw(*shape, seed=rank)


def _all_reduced(x, group):
    dist.all_reduce(x, group=group)
    return x.to_local()


def _broadcast(x, group):
    dist.broadcast(x, 1, group=group)
    return x.to_local()


def _gathered(x, group):
    out = torch.zeros(32)
    dist.all_gather_into_tensor(out, x, group=group)
    return out


def _gathered_to_list(x, group):
    out = [torch.zeros(8) for _ in range(4)]
    dist.all_gather(out, x, group=group)
    return torch.cat(out)


def _scattered(x, group):
    out = torch.zeros(2)
    dist.reduce_scatter_tensor(out, x, group=group)
    return out


def _exchanged(x, group):
    out = torch.zeros(8)
    dist.all_to_all_single(out, x, group=group)
    return out


# What is launched on each rank's part, how the parts make a DTensor, and what a rank gets of all
# parts.
COLLECTIVES = {
    "all_reduce_of_replicas": (_all_reduced, Replicate(), lambda parts, rank: sum(parts)),
    "all_reduce_of_shards": (_all_reduced, Shard(0), lambda parts, rank: sum(parts)),
    "all_reduce_of_sums": (_all_reduced, Partial(), lambda parts, rank: sum(parts)),
    "broadcast_of_replicas": (_broadcast, Replicate(), lambda parts, rank: parts[1]),
    "broadcast_of_shards": (_broadcast, Shard(0), lambda parts, rank: parts[1]),
    "all_gather": (_gathered, Replicate(), lambda parts, rank: torch.cat(parts)),
    "all_gather_list": (_gathered_to_list, Shard(0), lambda parts, rank: torch.cat(parts)),
    "reduce_scatter": (_scattered, Replicate(), lambda parts, rank: sum(parts).chunk(4)[rank]),
    "all_to_all": (
        _exchanged,
        Shard(0),
        lambda parts, rank: torch.cat([part.chunk(4)[rank] for part in parts]),
    ),
}


def _register(name, call, placement, expected):
    def run(given):
        x = DTensor.from_local(_mine(given.rank, 8), given.mesh, [placement], run_check=False)
        parts = [_mine(rank, 8) for rank in range(4)]
        yield call(x, given.mesh.get_group()), expected(parts, given.rank)

    run.__name__ = name
    on_mesh(ways=GLOO)(run)


for _name, _how in COLLECTIVES.items():
    _register(_name, *_how)


@on_mesh(ways=GLOO)
def all_reduce_of_gradients(given):
    weight = torch.nn.Parameter(
        DTensor.from_local(torch.ones(4), given.mesh, [Replicate()], run_check=False)
    )
    weight.register_post_accumulate_grad_hook(
        lambda p: dist.all_reduce(p.grad, group=given.mesh.get_group())
    )
    (weight.to_local() * _mine(given.rank, 4)).sum().backward()
    yield weight.grad.to_local(), sum(_mine(r, 4) for r in range(4))


@on_mesh(ways=("eager", "aot_eager", "one_graph"))
def hook_that_reduces(given):
    group = given.mesh.get_group()

    def reduce(g):
        g = g.clone()
        dist.all_reduce(g, group=group)
        return g

    def run(x):
        y = x * 2
        y.register_hook(reduce)
        return y.sin()

    x = _mine(given.rank, 4).requires_grad_()
    given.compiled(run)(x).sum().backward()
    yield x.grad, 2 * sum((2 * _mine(r, 4)).cos() for r in range(4))


@on_mesh(ways=("eager", "aot_eager", "lowered"))
def reduce_after_another(given):
    def run(a, m, x):
        dist.all_reduce(a)
        dist.reduce(m, 0)
        return a, (m if given.rank == 0 else x)

    mine = _mine(given.rank, 4)
    total = sum(_mine(r, 4) for r in range(4))
    yield (
        given.compiled(run)(mine.clone(), mine.clone(), mine),
        (total, total if given.rank == 0 else mine),
    )


def _dropped(given, placement):
    parts = DTensor.from_local(torch.ones(64), given.mesh, [placement], run_check=False)
    total = parts.full_tensor().flatten()[0]
    out = given.compiled(lambda x: F.dropout(x, 0.5))(parts)
    values = sorted(set(out.full_tensor().tolist()))
    yield values, [0.0, float(total) * 2]


@on_mesh()
def dropout_of_a_sum(given):
    yield from _dropped(given, Partial())


@on_mesh()
def dropout_of_shards(given):
    yield from _dropped(given, Shard(0))


@on_mesh()
def noise_of_a_sum(given):
    x = DTensor.from_local(torch.ones(64), given.mesh, [Partial()], run_check=False)
    out = given.compiled(lambda x: torch.bernoulli(torch.full_like(x, 0.5) * 1) + x * 0)(
        x
    ).full_tensor()
    yield set(out.tolist()) <= {0.0, 1.0}, True


@on_mesh()
def noise_of_replicas(given):
    x = distribute_tensor(torch.ones(64), given.mesh, [Replicate()], src_data_rank=None)
    found = given.compiled(lambda x: torch.rand_like(x) + F.dropout(x, 0.5))(x).to_local()
    every = [torch.zeros(64) for _ in range(4)]
    dist.all_gather(every, found, group=given.mesh.get_group())
    yield every, [every[0]] * 4


def _context_parallel(given, causal):
    from torch.distributed.tensor.experimental import context_parallel

    mine = draw(1, 2, 16, 8)
    with context_parallel(given.mesh, buffers=[mine], buffer_seq_dims=[2]):
        out = F.scaled_dot_product_attention(mine, mine, mine, is_causal=causal)
        yield list(out.shape), [1, 2, 4, 8]


@on_mesh(ways=GLOO)
def context_parallel_causal(given):
    yield from _context_parallel(given, True)


@on_mesh(ways=GLOO)
def context_parallel_full(given):
    yield from _context_parallel(given, False)


@on_mesh(ways=("eager",))
def pickled(given):
    import copy
    import io

    x = distribute_tensor(draw(8, 4), given.mesh, [Shard(0)], src_data_rank=None)
    layer = torch.nn.Linear(4, 4)
    layer.weight = torch.nn.Parameter(
        distribute_tensor(draw(4, 4), given.mesh, [Shard(0)], src_data_rank=None)
    )
    yield copy.deepcopy(layer).weight, layer.weight
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    yield x + 0, draw(8, 4)


@on_mesh(ways=GLOO)
def loss_over_classes(given):
    def build():
        torch.manual_seed(0)
        return nn.Linear(8, 16)

    labels = torch.tensor([1, 5, -100, 7])
    one = build()
    F.cross_entropy(one(draw(4, 8)), labels).backward()
    many = parallelize_module(build(), given.mesh, ColwiseParallel(use_local_output=False))

    def step(x, y):
        return F.cross_entropy(many(x), y)

    with loss_parallel():
        given.compiled(step)(draw(4, 8), labels).backward()
    yield [p.grad for p in many.parameters()], [p.grad for p in one.parameters()]
