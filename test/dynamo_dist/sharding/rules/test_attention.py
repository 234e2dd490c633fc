"""Attention on the CPU keeps a query where it is, as long as its rows need no other rank's."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

from dynamo_dist.numerics.ranks import split

pytestmark = pytest.mark.usefixtures("enabled")


@pytest.mark.parametrize(("causal", "placement"), [(False, Shard(2)), (True, Replicate())])
def test_a_query_sharded_on_its_length(ranks, causal, placement):
    q, k, v = (
        split(torch.randn(2, 2, 8, 4), ranks, [p], True)
        for p in (Shard(2), Replicate(), Replicate())
    )
    found = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert found.placements == (placement,)
    of_key = torch.autograd.grad(found.sum(), k)[0].placements
    assert of_key == ((Replicate(),) if causal else (Partial(),))
