"""Training as models do it

Checkpoints, experts, lengths that change, wrappers.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from comparison.row import drawn, laid_out, own, row
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

log = logging.getLogger(__name__)


class Net(nn.Module):
    """Two products, tensor-parallel."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


def net(mesh):
    """``Net`` under column- and row-wise parallelism."""
    return parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@row()
def tensor_parallel(mesh, rank):
    """Two products, tensor-parallel, trained."""
    return net(mesh), (drawn(3, 4),)


@row()
def checkpointed(mesh, rank):
    """A block under ``checkpoint(use_reentrant=False)``."""
    model = net(mesh)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            return checkpoint(self.model, x, use_reentrant=False)

    return Outer(), (drawn(3, 4),)


@row()
def checkpointed_reentrant(mesh, rank):
    """The same with ``use_reentrant=True``."""
    model = net(mesh)
    return lambda x: checkpoint(model, x, use_reentrant=True), (drawn(3, 4).requires_grad_(),)


_warned: set[str] = set()


def _warning_once(text):
    if text not in _warned:
        _warned.add(text)
        log.warning(text)


@row()
def checkpointed_that_warns(mesh, rank):
    """A warning that is said once, inside a checkpoint, kept in a set."""
    _warned.clear()  # eager mode ran before
    model = net(mesh)

    def block(x):
        _warning_once("said once")
        return model(x)

    return lambda x: checkpoint(block, x, use_reentrant=False), (drawn(3, 4).requires_grad_(),)


@row()
def checkpointed_that_fills_a_dictionary(mesh, rank):
    """A dictionary written inside a checkpoint, as caches of models are."""
    model = net(mesh)

    def f(x):
        kept: dict[str, Any] = {}

        def block(x):
            kept["last"] = x
            return model(x)

        y = checkpoint(block, x, use_reentrant=False)
        return y + kept["last"].sum()

    return f, (drawn(3, 4).requires_grad_(),)


@row()
def checkpointed_with_a_cache_given(mesh, rank):
    """A dictionary of the caller's, written inside a checkpoint."""
    model = net(mesh)

    def f(x, kept):
        def block(x):
            kept["calls"] = kept.get("calls", 0) + 1
            return model(x)

        return checkpoint(block, x, use_reentrant=False)

    return f, (drawn(3, 4).requires_grad_(), {})


@row(dynamic=True)
def experts_by_listed_sizes(mesh, rank):
    """Tokens sent to experts by ``tolist()`` of the split sizes, each rank its own."""
    group = mesh.get_group()

    def f(x, counts):
        theirs = funcol.all_to_all_single(counts, [1, 1], [1, 1], group)
        sends, receives = counts.tolist(), theirs.tolist()
        got = funcol.all_to_all_single_autograd(x, receives, sends, group)
        return funcol.all_to_all_single_autograd(got * 2, sends, receives, group)

    counts = torch.tensor([1, 3] if rank == 0 else [2, 3])
    return f, (own(rank, int(counts.sum()), 4).requires_grad_(), counts)


@row()
def experts_by_c10d(mesh, rank):
    """The same by ``dist.all_to_all_single`` in place."""

    def f(x, counts):
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts)
        sends, receives = counts.tolist(), theirs.tolist()
        got = x.new_empty(sum(receives), x.shape[1])
        dist.all_to_all_single(got, x, receives, sends)
        return got * 2

    counts = torch.tensor([1, 3] if rank == 0 else [2, 3])
    return f, (own(rank, int(counts.sum()), 4), counts)


@row()
def from_local_as_a_frame(mesh, rank):
    """``DTensor.from_local`` compiled alone, as a frame of its own."""

    def step(call, a):
        return call(a, mesh, [Partial()]).full_tensor() * 2

    return (DTensor.from_local, step), (own(rank, 3, 4).requires_grad_(),)


def _six_lengths(mesh):
    def f(x, w):
        return (x @ w).relu().sum(0).full_tensor()

    w = laid_out(mesh, [Replicate()], 4, 4, seed=1)
    return f, [(laid_out(mesh, [Shard(0)], 2 * n, 4, seed=n), w) for n in (2, 3, 4, 5, 6, 7)]


@row(dynamic=True)
def six_lengths(mesh, rank):
    """Six even lengths of a sharded batch with ``dynamic=True``."""
    return _six_lengths(mesh)


@row()
def six_lengths_by_themselves(mesh, rank):
    """The same without being told: Dynamo finds that lengths change."""
    return _six_lengths(mesh)


@row(dynamic=True)
def unlike_lengths(mesh, rank):
    """A tensor-parallel sequence of other lengths, uneven too."""

    def f(x, w):
        return (x @ w).redistribute(placements=[Replicate()]).sin()

    w = laid_out(mesh, [Replicate()], 4, 4, seed=1)
    return f, [(laid_out(mesh, [Shard(0)], n, 4, seed=n), w) for n in (4, 5, 7)]


@row()
def sequence_parallel(mesh, rank):
    """A norm on shards of the sequence before a product."""

    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.net = nn.LayerNorm(4), Net()

        def forward(self, x):
            return self.net(self.norm(x))

    plan = {
        "norm": SequenceParallel(),
        "net.up": ColwiseParallel(input_layouts=Shard(1)),
        "net.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(Sequence(), mesh, plan), (own(rank, 2, 3, 4),)


@row()
def fully_sharded(mesh, rank):
    """``fully_shard`` with batches of other lengths."""
    model = Net()
    fully_shard(model, mesh=mesh)
    return model, (own(rank, 3 + rank, 4),)


@row()
def data_parallel(mesh, rank):
    """``DistributedDataParallel`` with batches of other lengths."""
    return nn.parallel.DistributedDataParallel(Net()), (own(rank, 3 + rank, 4),)


@row(2, 2)
def fully_sharded_tensor_parallel(mesh, rank):
    """``fully_shard`` over tensor parallelism."""
    model = net(mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, (own(mesh["dp"].get_local_rank(), 3, 4),)


@row(trained=False)
def whole_step(mesh, rank):
    """Forward, ``backward()`` and the optimizer's step in one function."""
    model = net(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, [(model, drawn(3, 4, seed=s)) for s in range(2)]


@row()
def losses_averaged(mesh, rank):
    """A loss averaged over unlike batches, by ``all_reduce`` of the count."""

    def f(x, w):
        y = (x @ w.to_local(grad_placements=[Partial()])).square()
        count = torch.tensor(float(y.shape[0]))
        dist.all_reduce(count)
        return y.sum() / count

    return f, (own(rank, 2 + rank, 4), laid_out(mesh, [Replicate()], 4, 4))


@row()
def cross_entropy_of_sharded_logits(mesh, rank):
    """Cross entropy under ``loss_parallel``, trained."""
    from torch.distributed.tensor.parallel import loss_parallel

    labels = torch.tensor([1, 5, 7, 0])

    def f(x, w):
        with loss_parallel():
            target = DTensor.from_local(labels, mesh, [Replicate()], run_check=False)
            return torch.nn.functional.cross_entropy(x @ w, target)

    x, w = laid_out(mesh, [Replicate()], 4, 4), laid_out(mesh, [Shard(1)], 4, 8, seed=1)
    return f, (x, w)
