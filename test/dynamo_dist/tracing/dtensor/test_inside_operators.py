"""Operators that make plain tensors inside, traced: no error where eager has none, and the same
numbers.
"""

import logging

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dynamo_dist.errors import StrategyError
from dynamo_dist.torch_compat import dtensor_dispatch
from dynamo_dist.tracing import dtensor
from inductor_passes.testing import fake_group

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.fixture
def mesh():
    """Of four ranks this is the first."""
    with fake_group(4):
        yield init_device_mesh("cpu", (4,))


def placed(mesh, tensor, placement=Shard(0)):
    return distribute_tensor(tensor, mesh, [placement], src_data_rank=None)


IMAGE = torch.randn(4, 2, 6, 6, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([1, 7, 3, 2, 0, 5, 6, 4])
PROGRAMS = {
    "one_hot": (lambda x: F.one_hot(x, 8), LABELS),
    "one_hot of two dimensions": (lambda x: F.one_hot(x, 9).float().mean(0), LABELS.view(4, 2)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), IMAGE),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), IMAGE),
    "to a size": (lambda x: F.interpolate(x, size=(9, 4), mode="bicubic"), IMAGE),
    "upsample": (torch.nn.Upsample(scale_factor=3, mode="nearest-exact"), IMAGE),
    "power of order 0": (lambda x: torch.linalg.matrix_power(x, 0), IMAGE),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_compiled_as_in_eager_mode(mesh, name):
    function, tensor = PROGRAMS[name]
    x = placed(mesh, tensor)
    with dtensor_dispatch.made_tensors_are_replicas():  # upstream's eager refuses the last
        expected = function(x)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        if name == "power of order 0" and backend == "eager":
            continue  # runs the graph as eager does
        found = torch.compile(function, backend=backend, fullgraph=True)(x)
        assert found.placements == expected.placements
        torch.testing.assert_close(found.to_local(), expected.to_local())


def test_the_gradient_of_an_image(mesh):
    leaves = [placed(mesh, IMAGE).requires_grad_() for _ in range(2)]
    function = PROGRAMS["bilinear"][0]
    for run, x in zip(
        (function, torch.compile(function, backend="aot_eager")), leaves, strict=True
    ):
        run(x).square().sum().backward()
    found = [leaf.grad.to_local() for leaf in leaves]
    torch.testing.assert_close(*found)


def test_plain_tensor_is_refused_as_in_eager_mode(mesh):
    x = placed(mesh, IMAGE)
    with pytest.raises(Exception, match="mixed"):
        torch.compile(lambda x, y: x + y, backend="aot_eager")(x, IMAGE)
    assert not dtensor.are_distributed((x, {"other": IMAGE}))


def test_numbers_drawn_inside_are_refused(mesh):
    x = placed(mesh, torch.ones(4, 3), Replicate())

    def noisy():
        return x + torch.rand(4, 3)

    with pytest.raises(StrategyError, match="makes inside"):
        dtensor.once_more(noisy, (x,))


def test_call_that_has_written_is_not_run_again(mesh):
    x, calls = placed(mesh, torch.ones(4, 3), Replicate()), []

    def writes():
        calls.append(x.add_(1))
        return x + torch.ones(4, 3)

    with pytest.raises(RuntimeError, match="mixed"):
        dtensor.once_more(writes, (x,))
    assert len(calls) == 1


def test_the_switch_is_as_it_was(mesh):
    x = placed(mesh, torch.ones(4, 3), Replicate())
    dtensor.once_more(lambda: x + torch.ones(4, 3), (x,))
    with pytest.raises(RuntimeError, match="mixed"):
        x + torch.ones(4, 3)


def test_a_check_of_a_condition_is_no_gather(mesh, caplog):
    with caplog.at_level(logging.WARNING):
        torch._assert_async(placed(mesh, torch.tensor(True), Replicate()), "no")
    assert "no sharding strategy" not in caplog.text
