"""Reduce ops made inside a compiled function."""

import pytest
import torch
import torch.distributed as dist

from inductor_passes.testing import fake_group

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.mark.parametrize("op", [dist.ReduceOp.MAX, dist.ReduceOp.SUM])
def test_made_inside(op, compiled):
    def program(a):
        dist.all_reduce(a, op=dist.ReduceOp(op))
        return a * 2

    function, graphs = compiled(program)
    with fake_group(2):
        function(torch.ones(2))
    assert f", {op.name.lower()}, " in str(graphs[0].graph)
