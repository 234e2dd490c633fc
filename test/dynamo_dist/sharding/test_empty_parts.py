"""Fewer rows than ranks: what is computed of each row needs no other rank, whoever has none."""

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils import _pytree as pytree

from dynamo_dist.numerics.ranks import split, whole_tensor

# From 2.14 on torch gathers rows first where a rank has none, for extremes.
GATHERS = not torch.__version__.startswith("2.13.")
INDEX = torch.tensor([[0, 4], [1, 3], [2, 2]])
OF_EACH_ROW = {
    "logsumexp": lambda x, index: torch.logsumexp(x, 1),
    "amax": lambda x, index: torch.amax(x, 1, keepdim=True),
    "argmin": lambda x, index: torch.argmin(x, -1),
    "aminmax": lambda x, index: torch.aminmax(x, dim=1),
    "all": lambda x, index: torch.all(x > 0, 1),
    "largest": lambda x, index: torch.linalg.vector_norm(x, float("inf"), dim=1),
    "cummax": lambda x, index: torch.cummax(x, 1),
    "gather": lambda x, index: torch.gather(x, 1, index),
    "scatter": lambda x, index: torch.scatter(x, 1, index, 7.0),
    "scatter_add": lambda x, index: torch.scatter_add(x, 1, index, x),
    "gated": lambda x, index: torch.nn.functional.glu(x[:, :4], 1),
    "take": lambda x, index: torch.take_along_dim(x, index, 1),
}


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("name", OF_EACH_ROW)
def test_nothing_is_launched(ranks, name):
    x = torch.randn(3, 5)
    spread = [split(t, ranks, [Shard(0)], False) for t in (x, INDEX)]
    with CommDebugMode() as launched:
        found = pytree.tree_leaves(OF_EACH_ROW[name](*spread))
    assert launched.get_total_counts() == 0
    for one, expected in zip(found, pytree.tree_leaves(OF_EACH_ROW[name](x, INDEX)), strict=True):
        assert one.placements == (Shard(0),)
        torch.testing.assert_close(whole_tensor(one), expected)


@pytest.mark.usefixtures("enabled")
def test_both_halves_of_a_gate_are_gathered_at_once(ranks):
    x = torch.randn(8, 8)
    with CommDebugMode() as launched:
        found = torch.nn.functional.glu(split(x, ranks, [Shard(1)], False), 1)
    assert launched.get_total_counts() == 1
    torch.testing.assert_close(whole_tensor(found), torch.nn.functional.glu(x, 1))


LARGEST = {
    "amax": lambda x: torch.amax(x, 0),
    "amin": lambda x: torch.amin(x, 0, keepdim=True),
    "max": torch.max,
    "min of bools": lambda x: torch.min(x > 0),
    "max of numbers below zero": lambda x: torch.max(-(x.long() ** 2) - 1),
    "norm": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=0),
    "least norm": lambda x: torch.linalg.vector_norm(x, -float("inf")),
}


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("name", LARGEST)
def test_maximum_with_empty_ranks_is_partial(ranks, name):
    x = torch.randn(3, 5)
    with CommDebugMode() as launched:
        found = LARGEST[name](split(x, ranks, [Shard(0)], False))
    assert launched.get_total_counts() == GATHERS
    torch.testing.assert_close(whole_tensor(found), LARGEST[name](x))


@pytest.mark.usefixtures("enabled")
def test_clipped_norm_is_reduced_once_with_empty_ranks(ranks):
    x, few = torch.randn(8, 4), torch.randn(2)
    spread = [split(t, ranks, [Shard(0)], False) for t in (x, few)]
    parameters = [torch.nn.Parameter(torch.zeros_like(t)) for t in spread]
    for parameter, gradient in zip(parameters, spread, strict=True):
        parameter.grad = gradient
    with CommDebugMode() as launched:
        found = torch.nn.utils.clip_grad_norm_(parameters, 0.5, norm_type=float("inf"))
    assert launched.get_total_counts() == 1 + GATHERS
    torch.testing.assert_close(whole_tensor(found), torch.cat([x.flatten(), few]).abs().max())
    torch.testing.assert_close(
        whole_tensor(parameters[1].grad), few * (0.5 / (whole_tensor(found) + 1e-6))
    )


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("reduce", [torch.amax, torch.amin, torch.logsumexp, torch.argmax])
def test_reduction_with_empty_ranks_is_right(ranks, reduce):
    x = torch.randn(3, 5)
    found = reduce(split(x, ranks, [Shard(0)], False), 0)
    torch.testing.assert_close(whole_tensor(found), reduce(x, 0))
