"""Copies of DTensors inside a compiled function."""

import copy

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.fixture
def x():
    with fake_mesh(2) as mesh:
        yield distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)], src_data_rank=None)


def compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def test_deep_copy_has_memory_of_its_own(x):
    def program(x):
        y = copy.deepcopy(x)
        y.add_(1)
        return x * 1, y

    one, other = compiled(program)(x)
    assert torch.equal(one.to_local(), torch.ones(2, 2))
    assert torch.equal(other.to_local(), torch.full((2, 2), 2.0))
    assert other.placements == x.placements


def test_shallow_copy_shares_memory(x):
    def program(x):
        y = copy.copy(x)
        y.add_(1)
        return x * 1

    assert torch.equal(compiled(program)(x).to_local(), torch.full((2, 2), 2.0))


def test_a_copy_that_collects_gradients_breaks(x):
    program = compiled(lambda x: copy.deepcopy(x) * 2)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="Copy of a DTensor that requires"):
        program(x.requires_grad_())


def test_data_that_is_assigned_is_eager_modes(x):
    def program(x, y):
        x.data = y * 2
        return x + 1

    y, z = x + 1, x.clone()
    found = torch.compile(program, backend="aot_eager")(x, y)
    assert torch.equal(found.to_local(), program(z, y).to_local())
