"""A rank whose shard is empty launches in each pass what its peers launch, and nothing twice."""

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dynamo_dist
from dynamo_dist.backend import compile_graph
from dynamo_dist.testing import fake_mesh
from inductor_passes.inductor.session import graph_passes_only
from inductor_passes.report import recorder


def product(x, w):
    return ((x @ w).redistribute(placements=[Replicate()]),)


def saved_and_gathered(x, w):
    """``x``, which backward has for its pointwise part, is gathered for the product in both
    passes.
    """
    return x @ x.transpose(-1, -2), torch.log_softmax(x / (1 + x * x), 1), w * 2


UNSCHEDULED = {"schedule": "off", "disable": ["bucket_gathers", "merge_tiny"]}
# Program, ranks, shapes and placements. The forward launches what eager does: two gathers.
PROGRAMS = {
    "product": (product, 4, ((5, 7), Shard(0)), ((7, 10), Shard(0))),
    "saved and gathered": (
        saved_and_gathered,
        5,
        ((8, 4, 4), Shard(2)),
        ((4,), Shard(0)),
    ),
}


def launches(program, rank, ranks, *inputs):
    """By pass, what this rank's compiled program launches."""
    found = {}
    unsubscribe = recorder.subscribe(
        lambda record: found.update({record.phase: [c.agreed() for c in record.collectives]})
    )
    torch._dynamo.reset()
    try:
        # Enabled anew: eager's cached decisions hold local sizes, which are this rank's.
        with dynamo_dist.enabled(), fake_mesh(ranks, rank=rank) as mesh, graph_passes_only():
            x, w = (
                distribute_tensor(torch.ones(shape), mesh, [placement], src_data_rank=None)
                for shape, placement in inputs
            )
            step = torch.compile(
                program, backend=compile_graph, fullgraph=True, options=UNSCHEDULED
            )
            outs = step(x.detach().requires_grad_(), w.detach().requires_grad_())
            sum(out.to_local().sum() for out in outs).backward()
    finally:
        unsubscribe()
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_launch_the_same_in_each_pass(name):
    program, ranks, x, w = PROGRAMS[name]
    first, last = (launches(program, rank, ranks, x, w) for rank in (0, ranks - 1))
    assert first == last
    assert len(first["forward"]) == 2
