"""Reductions that torch decides for each mesh dimension by itself from 2.14 on."""

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from dynamo_dist.numerics.ranks import split, whole_tensor


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("order", [1, 2, 3, -1, float("inf"), float("-inf")])
def test_the_norm_of_one_number_is_a_dtensor(ranks, order):
    x = split(torch.tensor(-2.0), ranks, [Replicate()], True)
    norm = torch.linalg.vector_norm(x, order)
    assert isinstance(norm, DTensor)
    assert whole_tensor(norm) == 2
    norm.backward()
    assert whole_tensor(x.grad) == -1


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("kind", [torch.bool, torch.uint8, torch.float32])
def test_whether_all_are_true_is_pending(ranks, kind):
    gathers = not torch.__version__.startswith("2.13.")  # as torch does from then on
    x = (torch.randn(8, 3) > -1).to(kind)
    for dims in ((), (0,)):
        with CommDebugMode() as launched:
            found = torch.all(split(x, ranks, [Shard(0)], False), *dims)
        assert launched.get_total_counts() == gathers
        assert torch.equal(whole_tensor(found), torch.all(x, *dims))
