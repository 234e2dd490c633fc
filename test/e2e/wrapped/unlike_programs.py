"""Ranks that are unlike each other inside a wrapped forward: one way for all, or an error on the
one that leaves it.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist
from beside_eager import batch, line, program, train_with_breaks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dynamo_dist.errors import CannotFollowError
from dynamo_dist.settings import agreement_seconds


class Logging(nn.Module):
    """A block that prints inside its forward, on some ranks, from some time on: there its graph
    breaks.
    """

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 7), nn.Linear(7, 8)
        self.logs = False

    def forward(self, x):
        hidden = torch.relu(self.up(x))
        if self.logs:
            print("mean", hidden.mean().item())
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Logging(), Logging()

    def forward(self, x):
        return self.second(self.first(x))


def by_fsdp2(model):
    fully_shard(model.first, mesh=line())
    return fully_shard(model, mesh=line())


def log(model, logs):
    for each in model.modules():
        if isinstance(each, Logging):
            each.logs = logs


def trained(wrap, logging_from):
    """Four steps, with rows of each rank's own number."""

    def before(model, step):
        log(model, logging_from is not None and step >= logging_from)

    torch._dynamo.reset()
    train_with_breaks(wrap, Model(), 4, rows=4 + dist.get_rank(), before=before)


def on_first_rank(step):
    return step if dist.get_rank() == 0 else None


@program(2)
def one_rank_logs_under_fsdp2():
    trained(by_fsdp2, on_first_rank(0))


@program(2)
def one_rank_logs_under_ddp():
    trained(DistributedDataParallel, on_first_rank(0))


@program(2)
def one_rank_logs_where_ddp_launches_nothing():
    """Such a break leaves no rank waiting for a vote of this one, though Dynamo may skip the
    frame ever after.
    """
    for quiet in (lambda _: torch.no_grad(), lambda model: model.no_sync()):
        for goes_on in (False, True):
            torch._dynamo.reset()
            began = time.monotonic()
            model = DistributedDataParallel(Model())
            compiled = torch.compile(model, backend="dynamo_dist")
            log(model, dist.get_rank() == 0)
            with quiet(model):
                compiled(batch(0))
            log(model, goes_on and dist.get_rank() == 0)
            compiled(batch(1)).sum().backward()
            assert time.monotonic() - began < agreement_seconds()


@program(2)
def one_rank_logs_in_evaluation_after_training():
    """What has trained in one graph may train in eager mode next: no rank takes that for a
    break.
    """
    torch._dynamo.reset()
    began = time.monotonic()
    model = DistributedDataParallel(Model())
    compiled = torch.compile(model, backend="dynamo_dist")
    compiled(batch(0)).sum().backward()
    log(model, dist.get_rank() == 0)
    with torch.no_grad():
        compiled(batch(1))
    log(model, False)
    model(batch(2)).sum().backward()
    assert time.monotonic() - began < agreement_seconds()


@program(2)
def one_rank_logs_between_blocks():
    """Graphs of the ranks end at different places: none waits for the other where the other does
    not come.
    """
    torch._dynamo.reset()
    began = time.monotonic()
    model = Model()
    for block in (model.first, model.second):
        fully_shard(block, mesh=line())

    def forward(x):
        hidden = model.first(x)
        if dist.get_rank() == 0:
            print("between")
        return model.second(hidden)

    out = torch.compile(forward, backend="dynamo_dist")(batch(0))
    torch.testing.assert_close(out, model(batch(0)))
    assert time.monotonic() - began < agreement_seconds()


@program(2, sweep=True)
def all_ranks_log_later():
    trained(by_fsdp2, 2)


@program(2, sweep=True)
def one_rank_logs_later():
    """It is told, before it launches anything; the other is then at the mercy of gloo's
    time-out.
    """
    torch._dynamo.reset()
    os.environ["INDUCTOR_PASSES_AGREEMENT_SECONDS"] = "3"
    model = by_fsdp2(Model())
    compiled = torch.compile(model, backend="dynamo_dist")
    compiled(batch(0)).sum().backward()
    if dist.get_rank() == 0:
        log(model, True)
        with pytest.raises(CannotFollowError, match="A graph break has come into the forward"):
            compiled(batch(1))
    del os.environ["INDUCTOR_PASSES_AGREEMENT_SECONDS"]
