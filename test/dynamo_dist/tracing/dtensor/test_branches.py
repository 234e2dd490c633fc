"""Branches over DTensors: both are computed and one is taken."""

import pytest
import torch
from torch._higher_order_ops import while_loop
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.fixture
def x():
    with fake_mesh(2) as mesh:
        whole = torch.arange(8.0).view(4, 2)
        yield distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)


def one_graph(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("limit", [-1.0, 100.0])
def test_the_branch_that_the_condition_says(x, limit):
    def program(x, limit):
        return torch.cond(limit < x.amax(), lambda x: x * 2, lambda x: x - 1, (x,))

    whole = distribute_tensor(torch.tensor(limit), x.device_mesh, [Replicate()], src_data_rank=None)
    found = one_graph(program)(x, whole)
    expected = x.to_local() * 2 if limit < 0 else x.to_local() - 1
    assert torch.equal(found.to_local(), expected)
    assert found.placements == (Shard(0),)


def test_results_that_are_laid_out_otherwise(x):
    def program(x, c):
        return torch.cond(
            c.sum() > 0, lambda x: x * 2, lambda x: x.redistribute(placements=[Replicate()]), (x,)
        )

    found = one_graph(program)(x, torch.ones(1))
    assert torch.equal(found.to_local(), x.to_local() * 2)


def test_gradients_break(x):
    program = one_graph(lambda x: torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,)))
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"torch\.cond over DTensors"):
        program(x.requires_grad_())


def test_a_loop_breaks(x):
    def program(i, x):
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (i, x))

    with pytest.raises(torch._dynamo.exc.Unsupported, match="while_loop over DTensors"):
        one_graph(program)(torch.tensor(0), x)


def test_plain_tensors_stay_upstreams(compiled):
    def program(x):
        return torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x - 1, (x,))

    function, graphs = compiled(program)
    assert torch.equal(function(torch.ones(2)), torch.full((2,), 2.0))
    assert graphs[0].graph.find_nodes(op="call_function", target=torch.ops.higher_order.cond)
