"""Calls that eager's cache takes for one another are decided alike."""

import operator

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import dynamo_dist
from dynamo_dist.numerics.ranks import split
from dynamo_dist.testing import fake_mesh


@pytest.mark.parametrize("operation", [operator.add, operator.sub, operator.mul, operator.truediv])
@pytest.mark.parametrize("placement", [Partial(), Shard(0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("number_first", [True, False])
def test_a_number_and_a_replicated_tensor(ranks, operation, placement, dtype, number_first):
    number = 2.0 if dtype.is_floating_point else 2
    x = torch.arange(1, 9, dtype=torch.float64)
    tensor = torch.tensor(number, dtype=dtype)
    others = [number, split(tensor, ranks, [Replicate()]), tensor]
    with dynamo_dist.enabled():
        for other in others if number_first else reversed(others):
            found = operation(split(x, ranks, [placement]), other)
            whole = found.redistribute(placements=[Replicate()]).to_local().reconcile()
            torch.testing.assert_close(whole, operation(x, number))


def test_what_takes_no_numbers_keeps_its_shards():
    """The gradient of a clamp is taken from a mask and a zero without dimensions."""
    with fake_mesh(4) as mesh, dynamo_dist.enabled(), CommDebugMode() as communication:
        x = torch.randn(8, 4, dtype=torch.float64)
        x = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
        x.requires_grad_().clamp(min=0.5).to_local().sum().backward()
    assert x.grad.placements == (Shard(0),)
    assert communication.get_total_counts() == 0
    assert torch.equal(x.grad.to_local(), (x.to_local() >= 0.5).double())


def test_what_decompositions_are_made_of_keeps_its_shards():
    with fake_mesh(4) as mesh, dynamo_dist.enabled(), CommDebugMode() as communication:
        x = distribute_tensor(torch.randn(8, 4), mesh, [Shard(0)], src_data_rank=None)
        mask = torch.ops.prims.gt(x, x * 0)
        found = torch.ops.prims.where(mask, x, torch.ops.prims.convert_element_type(mask, x.dtype))
    assert found.placements == (Shard(0),)
    assert communication.get_total_counts() == 0
    assert torch.equal(found.to_local(), x.to_local().clamp(min=0))
