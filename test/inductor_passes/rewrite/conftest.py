"""Graphs of all ranks, before and after a pass, run side by side."""

import pytest
import torch
from fuzzing.lockstep import run_in_lockstep
from torch.utils import _pytree as pytree

from inductor_passes.graph.collectives import launches, payload_bytes
from inductor_passes.pipeline import run_pass
from inductor_passes.testing import fake_group, trace


def by_dtensor(graph):
    """Say of every split what Dynamo says of those that DTensor makes in a redistribute."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.split.Tensor:
            node.meta["source_fn_stack"] = [("redistribute", "redistribute")]
    return graph


@pytest.fixture
def on_all_ranks():
    """``on_all_ranks(pass_, fn, *shapes)``: same numbers on every rank, and rank 0's record.

    ``fn(rank, *tensors)`` is traced once a rank; ``shapes`` are local, or functions of the rank.
    """

    def check(pass_, fn, *shapes, dtype=torch.float32, ranks=4, exact=True, dtensor=False):
        before, after, inputs, records = [], [], [], []
        generator = torch.Generator().manual_seed(0)
        for rank in range(ranks):
            local = [shape(rank) if callable(shape) else shape for shape in shapes]
            inputs.append([torch.randn(s, generator=generator).to(dtype) for s in local])

            def program(*tensors, rank=rank):
                return fn(rank, *tensors)

            with fake_group(ranks, rank):
                graphs = [trace(program, *local, dtype=dtype) for _ in range(2)]
                if dtensor:
                    graphs = [by_dtensor(graph) for graph in graphs]
                records.append(run_pass(pass_, graphs[1]))
                again = run_pass(pass_, graphs[1])
                assert not again.changed
            before.append(graphs[0])
            after.append(graphs[1])
        assert len({record.changed for record in records}) == 1, "ranks decided differently"
        expected, got = run_in_lockstep(before, inputs), run_in_lockstep(after, inputs)
        for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(got), strict=True):
            assert a.dtype == b.dtype and a.shape == b.shape
            if exact:
                assert torch.equal(a, b)
            else:  # sums of 4 float32 terms in another order
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        payloads = [sum(map(payload_bytes, launches(graph))) for graph in (before[0], after[0])]
        return records[0], after[0], payloads

    return check
