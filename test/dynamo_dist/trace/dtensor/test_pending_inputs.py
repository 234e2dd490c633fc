"""Inputs whose collective may still run, out of eager mode: gradients go back through them."""

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
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
