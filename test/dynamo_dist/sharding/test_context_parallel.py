"""Attention inside ``context_parallel`` on the CPU: right, or refused."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel

from dynamo_dist.errors import StrategyError
from dynamo_dist.numerics.ranks import split, whole_tensor
from dynamo_dist.testing import fake_mesh

pytestmark = pytest.mark.usefixtures("enabled")


def parts(*lengths):
    """Query, key and value of one rank, (batch, heads, length of its part, width)."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 4, length, 8, generator=generator) for length in lengths]


WHOLE = parts(8, 8, 8)


@pytest.fixture
def inside():
    """A mesh of two ranks, inside its context; of two, this is the first."""
    with (
        fake_mesh(2) as mesh,
        context_parallel(mesh, buffers=[torch.zeros(8)], buffer_seq_dims=[0]),
    ):
        yield mesh


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": True, "scale": 0.5},
        {"attn_mask": torch.ones(1, 1, 4, 8, dtype=torch.bool)},
    ],
)
def test_what_depends_on_the_order_of_the_sequence_is_refused(inside, options):
    with pytest.raises(
        StrategyError, match="context_parallel cannot compute attention with a mask"
    ):
        F.scaled_dot_product_attention(*parts(4, 4, 4), **options)


def test_grouped_heads_under_a_causal_mask_are_refused(inside):
    query, key, value = parts(4, 4, 4)
    with pytest.raises(StrategyError, match="context_parallel cannot compute"):
        F.scaled_dot_product_attention(
            query, key[:, :2], value[:, :2], is_causal=True, enable_gqa=True
        )


@pytest.mark.parametrize("length", [4, 512])
@pytest.mark.parametrize("dropout", [0.0, 1e-9])  # with dropout it is no kernel but many operators
def test_the_result_is_of_this_ranks_queries(inside, length, dropout):
    found = F.scaled_dot_product_attention(*parts(*[length] * 3), dropout_p=dropout)
    assert found.shape == (2, 4, length, 8)


@pytest.mark.parametrize("dropout", [0.0, 1e-9])
def test_the_numbers_are_those_of_one_device(ranks, dropout):
    expected = F.scaled_dot_product_attention(*WHOLE)
    local = [split(each, ranks, [Shard(2)])._local_tensor for each in WHOLE]
    with context_parallel(ranks, buffers=[torch.zeros(8)], buffer_seq_dims=[0]):
        found = F.scaled_dot_product_attention(*local, dropout_p=dropout)
    found = DTensor.from_local(found, ranks, [Shard(2)], run_check=False)
    assert torch.allclose(whole_tensor(found), expected, atol=1e-5)


def test_outside_a_causal_mask_is_computed(ranks):
    with context_parallel(ranks, buffers=[torch.zeros(8)], buffer_seq_dims=[0]):
        pass
    q, k, v = (split(each, ranks, [Shard(2)]) for each in WHOLE)
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = F.scaled_dot_product_attention(*WHOLE, is_causal=True)
    assert torch.allclose(whole_tensor(found), expected, atol=1e-5)
