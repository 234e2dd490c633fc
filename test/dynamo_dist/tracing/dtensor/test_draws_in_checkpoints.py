"""Dropout on DTensors in checkpointed blocks: the recomputed mask is the one of the forward."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("enabled")
BACKENDS = ["aot_eager", "aot_eager_decomp_partition"]


def block(x):
    return F.dropout(x, 0.5).sin()


def checkpointed(x):
    return checkpoint(block, x, use_reentrant=False)


def two_of_them(x):
    return checkpointed(checkpointed(x))


def step(function, mesh, placements, backend, **options):
    """Local output and gradient of ones in 16 x 8."""
    x = distribute_tensor(torch.ones(16, 8), mesh, placements, src_data_rank=None)
    x = x.detach().requires_grad_()
    torch.manual_seed(1)
    y = torch.compile(function, backend=backend, fullgraph=True, **options)(x)
    y.to_local().sum().backward()
    return y.to_local(), x.grad.to_local()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("function", [block, checkpointed, two_of_them])
def test_the_mask_of_the_forward(mesh, function, backend):
    y, gradient = step(function, mesh, [Shard(0), Replicate()], backend)
    assert 0 < (y == 0).sum() < y.numel()
    assert torch.equal(gradient == 0, y == 0)


@pytest.mark.parametrize("placements", [[Replicate(), Replicate()], [Shard(0), Replicate()]])
def test_the_numbers_of_eager(mesh, placements):
    compiled = step(checkpointed, mesh, placements, "aot_eager")
    x = distribute_tensor(torch.ones(16, 8), mesh, placements, src_data_rank=None)
    x = x.detach().requires_grad_()
    torch.manual_seed(1)
    y = block(x)
    y.to_local().sum().backward()
    assert torch.equal(compiled[0], y.to_local()) and torch.equal(compiled[1], x.grad.to_local())


def test_dynamic_sizes_are_saved_behind_the_mesh(mesh):
    y, gradient = step(checkpointed, mesh, [Shard(0), Replicate()], "aot_eager", dynamic=True)
    assert torch.equal(gradient == 0, y == 0)


def test_beside_a_tensor_and_a_collective(mesh):
    def function(x):
        def block(x):
            return F.dropout(x.redistribute(placements=[Replicate(), Replicate()]), 0.5).sin()

        return checkpoint(block, x, use_reentrant=False)

    y, gradient = step(function, mesh, [Shard(0), Replicate()], "aot_eager")
    assert y.shape == (16, 8) and gradient.shape == (8, 8)
