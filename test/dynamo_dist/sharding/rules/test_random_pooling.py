"""Fractional pooling: one set of random samples for all ranks."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

from dynamo_dist.numerics.ranks import split, whole_tensor

pytestmark = pytest.mark.usefixtures("enabled")
IMAGE = torch.randn(4, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def test_ranks_that_draw_their_own_pool_alike(ranks):
    found = F.fractional_max_pool2d(split(IMAGE, ranks, [Replicate()]), 2, output_size=3)
    assert found.placements == (Replicate(),)
    assert whole_tensor(found).shape == (4, 4, 3, 3)  # replicas that differ are an error


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Shard(2), Partial()])
def test_of_given_samples_it_equals_one_device(ranks, placement):
    drawn = torch.rand(4, 4, 2, generator=torch.Generator().manual_seed(1))
    pool = torch.nn.FractionalMaxPool2d(2, output_size=3, _random_samples=drawn)
    whole = IMAGE.clone().requires_grad_()
    expected = pool(whole)
    image = split(IMAGE, ranks, [placement], True)
    found = pool(image)
    assert torch.allclose(whole_tensor(found), expected, atol=1e-5)
    found.square().sum().backward()
    expected.square().sum().backward()
    assert torch.allclose(whole_tensor(image.grad), whole.grad, atol=1e-5)
    if placement in (Shard(0), Shard(1)):
        assert found.placements == (placement,)
