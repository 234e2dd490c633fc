"""Backward through some of a graph's DTensor outputs: the gradients are eager's, and nothing is
sent for the rest.
"""

import pytest
import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.fixture
def row():
    with fake_mesh(4) as made:
        yield made


def three(d):
    return d.sin(), d.sum(0), (d * 2).redistribute(placements=[Replicate()])


def sharded(mesh):
    torch.manual_seed(0)
    d = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)], src_data_rank=None)
    return d.requires_grad_()


@pytest.mark.parametrize("used", [[0], [1], [2], [0, 2], [1, 2], [0, 1, 2]])
def test_gradients_are_eagers(row, used):
    eager, traced = sharded(row), sharded(row)
    compiled = torch.compile(three, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        for function, d in ((three, eager), (compiled, traced)):
            outputs = function(d)
            loss = sum(outputs[i].to_local().sum() for i in used)
            loss.backward()
    expected = eager.grad.redistribute(placements=traced.grad.placements)
    torch.testing.assert_close(traced.grad.to_local(), expected.to_local())


def test_nothing_is_sent_for_a_partial_output_that_is_not_used(row):
    d = sharded(row)
    first, pending, _ = torch.compile(three, backend="aot_eager", fullgraph=True)(d)
    assert pending.placements == (Partial(),)
    local = first.to_local()
    with CommDebugMode() as mode:
        local.sum().backward()
    eager = sharded(row)
    local = three(eager)[0].to_local()
    with CommDebugMode() as expected:
        local.sum().backward()
    assert expected.get_total_counts() == 0
    # The backward graph reduces the gathered output's gradient, zeros or not.
    assert mode.get_total_counts() <= 1


def test_a_plain_gradient_of_another_kind_is_refused_as_before(row):
    d = sharded(row)
    first, second, _ = torch.compile(three, backend="aot_eager", fullgraph=True)(d)
    with pytest.raises(RuntimeError, match=r"tangent|guessed its"):
        torch.autograd.backward([first, second], [torch.ones(8, 8), torch.ones(8)])


def test_the_outputs_are_not_kept(row):
    import gc
    import weakref

    d = sharded(row)
    outputs = torch.compile(three, backend="aot_eager", fullgraph=True)(d)
    kept = weakref.ref(outputs[1]._local_tensor)
    loss = outputs[0].to_local().sum()
    del outputs
    gc.collect()
    assert kept() is None
    loss.backward()
    assert isinstance(d.grad, DTensor)
