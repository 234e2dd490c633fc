"""``with loss_parallel():`` inside the compiled function: eager's loss, gradient and launches."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from dynamo_dist.testing import fake_mesh
from dynamo_dist.torch_compat.dtensor_strategies import dtensor_op_handlers

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.fixture
def row():
    table = dtensor_op_handlers()
    before = dict(table)
    with fake_mesh(8) as made:
        yield made
    # In eager mode torch's context leaves its handlers behind if what it holds raises.
    table.clear()
    table.update(before)


def logits(mesh, shape=(16, 32), requires_grad=False):
    torch.manual_seed(0)
    d = distribute_tensor(torch.randn(shape), mesh, [Shard(1)], src_data_rank=None)
    return d.requires_grad_(requires_grad)


MODULE = torch.nn.CrossEntropyLoss()
LOSSES = {
    "mean": lambda d, y: F.cross_entropy(d, y),
    "sum, ignored class": lambda d, y: F.cross_entropy(d, y, reduction="sum", ignore_index=3),
    "none": lambda d, y: F.cross_entropy(d, y, reduction="none"),
    "module": lambda d, y: MODULE(d * 2, y),
    "in two steps": lambda d, y: F.nll_loss(F.log_softmax(d, 1), y),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("around_backward", [True, False])
def test_the_loss_and_its_gradient_are_eagers(row, name, around_backward):
    def program(d, y):
        with loss_parallel():
            return LOSSES[name](d, y)

    y = torch.arange(16) % 4
    eager, traced = (logits(row, requires_grad=True) for _ in range(2))
    expected = program(eager, y)
    found = torch.compile(program, backend="aot_eager", fullgraph=True)(traced, y)
    assert torch.equal(found.to_local(), expected.to_local())
    assert found.placements == expected.placements
    with loss_parallel():
        expected.sum().backward()
    if around_backward:
        with loss_parallel():
            found.sum().backward()
    else:
        found.sum().backward()
    assert torch.allclose(eager.grad.to_local(), traced.grad.to_local())


def test_the_context_ends_where_it_ends(row, compiled):
    """After the context the same call is DTensor's own: it gathers the classes."""

    def program(d):
        with loss_parallel():
            inside = F.log_softmax(d, 1)
        return inside, F.log_softmax(d, 1)

    d = logits(row)
    found, expected = compiled(program)[0](d), program(d)
    assert [x.placements for x in found] == [x.placements for x in expected]
    assert expected[0].placements != expected[1].placements


def test_context_around_a_compiled_function_is_unchanged(row):
    y = torch.zeros(16, dtype=torch.long)

    def program(d, y):
        with loss_parallel():
            return F.cross_entropy(d, y)

    d = logits(row)
    table = DTensor._op_dispatcher._custom_op_handlers
    before = dict(table)
    torch.compile(program, backend="aot_eager", fullgraph=True)(d, y)
    assert table == before


def test_plain_tensors_inside_the_context_are_upstreams(row, compiled):
    def program(x, y):
        with loss_parallel():
            return F.cross_entropy(x, y)

    x, y = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
    assert torch.equal(compiled(program)[0](x, y), F.cross_entropy(x, y))


def test_a_replicated_input_is_refused_as_in_eager(row):
    d = distribute_tensor(torch.randn(4, 8), row, [Replicate()], src_data_rank=None)

    def program(d):
        with loss_parallel():
            return F.log_softmax(d, 1)

    with pytest.raises(ValueError, match="loss_parallel") as eager:
        program(d)
    with pytest.raises(Exception, match=re.escape(str(eager.value).splitlines()[0])):
        torch.compile(program, backend="aot_eager", fullgraph=True)(d)
