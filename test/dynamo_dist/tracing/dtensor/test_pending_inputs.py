"""Inputs whose collective may still run, out of eager mode: gradients go back through them."""

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("enabled")


def pending_model(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    # Fake ranks send nothing: each cuts its own part.
    return parallelize_module(model, mesh["tp"], plan, src_data_rank=None)


def gradients_behind(model, function):
    x = torch.arange(12.0).view(3, 4).div(7).requires_grad_()
    scale = torch.full((3, 4), 2.0, requires_grad=True)
    model.zero_grad()
    pending = model(x)
    assert isinstance(pending, AsyncCollectiveTensor)
    found = function(pending, scale)
    found.sum().backward()
    weights = [param.grad.to_local() for param in model.parameters()]
    return [found.detach(), x.grad, scale.grad, *weights]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda y, scale: (y * scale).sin(),
        lambda y, scale: y.view(4, 3).sin() * scale.view(4, 3),
        lambda y, scale: y.detach() * scale + y.sum(),
    ],
    ids=["used", "viewed", "detached"],
)
def test_gradients_are_eagers(mesh, function, dynamic):
    model = pending_model(mesh)
    run = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    expected = gradients_behind(model, function)
    for _ in range(2):
        assert_close(gradients_behind(model, run), expected)


def test_without_gradients_none_is_made(mesh):
    model = pending_model(mesh)
    with torch.no_grad():
        found = torch.compile(lambda y: y * 2, backend="aot_eager")(model(torch.ones(3, 4)))
    assert not found.requires_grad


def _added(y):
    y.add_(1)
    return y * 2


def _written_through_a_view(y):
    y.view(-1).mul_(3)
    return y + 1


@pytest.mark.parametrize("function", [_added, _written_through_a_view])
def test_what_is_written_to_a_dtensor_in_flight_is_there(mesh, function):
    def pending():
        whole = DTensor.from_local(torch.full((2, 2), 0.5), mesh["tp"], [Partial()])
        found = whole.redistribute(placements=[Replicate()], async_op=True)
        assert isinstance(found._local_tensor, AsyncCollectiveTensor)
        return found

    theirs, ours = pending(), pending()
    expected = function(theirs)
    found = torch.compile(function, backend="aot_eager", fullgraph=True)(ours)
    assert_close(found.to_local(), expected.to_local())
    assert_close(ours.to_local(), theirs.to_local())
    assert not theirs.to_local().eq(0.5).any()
