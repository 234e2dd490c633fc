"""Calls that eager's cache takes for one another are decided alike."""

import operator

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import dynamo_dist
from dynamo_dist.verifying.ranks import split


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
