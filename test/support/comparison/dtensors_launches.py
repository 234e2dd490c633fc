"""Collectives and random numbers asked of DTensors in eager mode: right, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparison.dtensors import program
from comparison.feature import draw
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

# Of threads, a group gets the DTensor itself, and what torch keeps for a process is kept for all of them.
GLOO = ("gloo",)


def _mine(rank: int, *shape: int) -> torch.Tensor:
    return draw(*shape, seed=rank)


@program(backends=GLOO)
def all_reduce(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    x = DTensor.from_local(_mine(rank, 4), mesh, [Replicate()], run_check=False)
    dist.all_reduce(x, group=mesh.get_group())
    yield x.to_local(), sum(_mine(r, 4) for r in range(4))


@program(backends=GLOO)
def all_reduce_of_shards(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    x = DTensor.from_local(_mine(rank, 4), mesh, [Shard(0)], run_check=False)
    dist.all_reduce(x, group=mesh.get_group())
    yield x.to_local(), sum(_mine(r, 4) for r in range(4))


@program(backends=GLOO)
def broadcast_of_shards(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    x = DTensor.from_local(_mine(rank, 4), mesh, [Shard(0)], run_check=False)
    dist.broadcast(x, 1, group=mesh.get_group())
    yield x.to_local(), _mine(1, 4)


@program(backends=GLOO)
def all_reduce_of_sums(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    x = DTensor.from_local(_mine(rank, 4), mesh, [Partial()], run_check=False)
    dist.all_reduce(x, group=mesh.get_group())
    yield x.to_local(), sum(_mine(r, 4) for r in range(4))


@program(backends=GLOO)
def broadcast(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    x = DTensor.from_local(_mine(rank, 4), mesh, [Replicate()], run_check=False)
    dist.broadcast(x, 1, group=mesh.get_group())
    yield x.to_local(), _mine(1, 4)


@program(backends=GLOO)
def all_gather(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    x = DTensor.from_local(_mine(rank, 4), mesh, [Replicate()], run_check=False)
    out = torch.zeros(16)
    dist.all_gather_into_tensor(out, x, group=mesh.get_group())
    yield out, torch.cat([_mine(r, 4) for r in range(4)])


@program(backends=GLOO)
def all_gather_list(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    x = DTensor.from_local(_mine(rank, 4), mesh, [Shard(0)], run_check=False)
    out = [torch.zeros(4) for _ in range(4)]
    dist.all_gather(out, x, group=mesh.get_group())
    yield torch.cat(out), torch.cat([_mine(r, 4) for r in range(4)])


@program(backends=GLOO)
def reduce_scatter(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    x = DTensor.from_local(_mine(rank, 8), mesh, [Replicate()], run_check=False)
    out = torch.zeros(2)
    dist.reduce_scatter_tensor(out, x, group=mesh.get_group())
    yield out, sum(_mine(r, 8) for r in range(4)).chunk(4)[rank]


@program(backends=GLOO)
def all_to_all(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    x = DTensor.from_local(_mine(rank, 4), mesh, [Shard(0)], run_check=False)
    out = torch.zeros(4)
    dist.all_to_all_single(out, x, group=mesh.get_group())
    yield out, torch.stack([_mine(r, 4)[rank] for r in range(4)])


@program(backends=GLOO)
def all_reduce_of_gradients(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    weight = torch.nn.Parameter(
        DTensor.from_local(torch.ones(4), mesh, [Replicate()], run_check=False)
    )
    weight.register_post_accumulate_grad_hook(
        lambda p: dist.all_reduce(p.grad, group=mesh.get_group())
    )
    (weight.to_local() * _mine(rank, 4)).sum().backward()
    yield weight.grad.to_local(), sum(_mine(r, 4) for r in range(4))


@program(backends=("eager", "aot_eager", "one_graph"))
def hook_that_reduces(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    group = mesh.get_group()

    def reduce(g: torch.Tensor) -> torch.Tensor:
        g = g.clone()
        dist.all_reduce(g, group=group)
        return g

    def run(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(reduce)
        return y.sin()

    x = _mine(rank, 4).requires_grad_()
    wrap(run)(x).sum().backward()
    yield x.grad, 2 * sum((2 * _mine(r, 4)).cos() for r in range(4))


@program(backends=("eager", "aot_eager", "lowered"))
def reduce_after_another(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    def run(a: torch.Tensor, m: torch.Tensor, x: torch.Tensor) -> Any:
        dist.all_reduce(a)
        dist.reduce(m, 0)
        return a, (m if rank == 0 else x)

    mine = _mine(rank, 4)
    total = sum(_mine(r, 4) for r in range(4))
    yield wrap(run)(mine.clone(), mine.clone(), mine), (total, total if rank == 0 else mine)


def _dropped(mesh: Any, rank: int, wrap: Callable[..., Any], placement: Any) -> Any:
    parts = DTensor.from_local(torch.ones(64), mesh, [placement], run_check=False)
    total = parts.full_tensor().flatten()[0]
    out = wrap(lambda x: F.dropout(x, 0.5))(parts)
    values = sorted(set(out.full_tensor().tolist()))
    yield values, [0.0, float(total) * 2]


@program()
def dropout_of_a_sum(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    yield from _dropped(mesh, rank, wrap, Partial())


@program()
def dropout_of_shards(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    yield from _dropped(mesh, rank, wrap, Shard(0))


@program()
def noise_of_a_sum(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    x = DTensor.from_local(torch.ones(64), mesh, [Partial()], run_check=False)
    out = wrap(lambda x: torch.bernoulli(torch.full_like(x, 0.5) * 1) + x * 0)(x).full_tensor()
    yield set(out.tolist()) <= {0.0, 1.0}, True


@program()
def noise_of_replicas(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    x = distribute_tensor(torch.ones(64), mesh, [Replicate()], src_data_rank=None)
    found = wrap(lambda x: torch.rand_like(x) + F.dropout(x, 0.5))(x).to_local()
    every = [torch.zeros(64) for _ in range(4)]
    dist.all_gather(every, found, group=mesh.get_group())
    yield every, [every[0]] * 4


@program()
def noise_of_shards(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    x = distribute_tensor(torch.ones(64), mesh, [Shard(0)], src_data_rank=None)
    found = wrap(lambda x: torch.rand_like(x))(x).full_tensor()
    yield len(found.unique()), 64


@program(backends=GLOO)
def context_parallel_causal(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    from torch.distributed.tensor.experimental import context_parallel

    q = draw(1, 2, 16, 8)
    expected = F.scaled_dot_product_attention(q, q, q, is_causal=True)
    mine = q.clone()
    with context_parallel(mesh, buffers=[mine], buffer_seq_dims=[2]):
        out = F.scaled_dot_product_attention(mine, mine, mine, is_causal=True)
        shape = list(out.shape)
    yield shape, [1, 2, 4, 8]
    yield expected.shape, q.shape


@program(backends=GLOO)
def context_parallel_full(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    from torch.distributed.tensor.experimental import context_parallel

    mine = draw(1, 2, 16, 8)
    with context_parallel(mesh, buffers=[mine], buffer_seq_dims=[2]):
        out = F.scaled_dot_product_attention(mine, mine, mine, is_causal=False)
        yield list(out.shape), [1, 2, 4, 8]


@program(backends=("eager",))
def pickled(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    import copy
    import io

    x = distribute_tensor(draw(8, 4), mesh, [Shard(0)], src_data_rank=None)
    layer = torch.nn.Linear(4, 4)
    layer.weight = torch.nn.Parameter(
        distribute_tensor(draw(4, 4), mesh, [Shard(0)], src_data_rank=None)
    )
    yield copy.deepcopy(layer).weight, layer.weight
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    yield x + 0, draw(8, 4)


@program(backends=GLOO)
def loss_over_classes(mesh: Any, rank: int, wrap: Callable[..., Any]) -> Any:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Linear(8, 16)

    labels = torch.tensor([1, 5, -100, 7])
    one = build()
    F.cross_entropy(one(draw(4, 8)), labels).backward()
    many = parallelize_module(build(), mesh, ColwiseParallel(use_local_output=False))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(many(x), y)

    with loss_parallel():
        wrap(step)(draw(4, 8), labels).backward()
    yield [p.grad for p in many.parameters()], [p.grad for p in one.parameters()]
