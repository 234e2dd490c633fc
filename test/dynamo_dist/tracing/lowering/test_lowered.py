"""Programs through Inductor's lowering, as each rank of two sees them: every launch after
another one.
"""

import pytest
import torch
import torch.distributed as dist

from inductor_passes.testing import fake_group

pytestmark = pytest.mark.usefixtures("enabled", "without_kernels")


def reduce(x, rank):
    dist.reduce(x, 1)


def reduce_later(x, rank):
    work = dist.reduce(x, 1, op=dist.ReduceOp.MAX, async_op=True)
    y = x.new_ones(4, 4) @ x.new_ones(4, 4)
    work.wait()
    return y


def receive_for_nothing(x, rank):
    dist.recv(torch.empty_like(x), 1 - rank) if rank else dist.send(x, 1 - rank)


def gather(x, rank):
    dist.gather(x, [torch.empty_like(x) for _ in range(2)] if rank else None, 1)


def scatter(x, rank):
    dist.scatter(x, [x + 1, x + 2] if rank else None, 1)


def barrier(x, rank):
    dist.barrier()


def exchange(x, rank):
    received = torch.empty_like(x)
    operations = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


LAST = [reduce, reduce_later, receive_for_nothing, gather, scatter, barrier, exchange]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("last", LAST)
def test_a_launch_after_another(last, rank):
    """What is ordered must be lowered to what its stand-in says, also where nobody reads it."""

    def program(first, x, other):
        dist.all_reduce(first)
        found = last(x, rank)
        dist.all_reduce(other)
        return found, first * 2, (x if rank else other)

    with fake_group(2, rank):
        compiled = torch.compile(program, backend="dynamo_dist", fullgraph=True)
        compiled(torch.ones(4, 4), torch.ones(3, 5), torch.ones(2))
