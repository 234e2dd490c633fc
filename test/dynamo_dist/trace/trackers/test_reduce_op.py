"""Reduce ops made inside a compiled function."""

import pytest
import torch
import torch.distributed as dist

from inductor_passes.testing import fake_group

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.mark.parametrize("op", [dist.ReduceOp.MAX, dist.ReduceOp.SUM])
def test_made_inside(op):
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return gm

    def program(a):
        dist.all_reduce(a, op=dist.ReduceOp(op))
        return a * 2

    with fake_group(2):
        torch.compile(program, backend=backend, fullgraph=True)(torch.ones(2))
    assert f", {op.name.lower()}, " in str(graphs[0].graph)
