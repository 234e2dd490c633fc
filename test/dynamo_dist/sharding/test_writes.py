"""Writes to views across shards reach the tensor, in eager mode and compiled, with gradients."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import dynamo_dist
from dynamo_dist.numerics.ranks import split, whole_tensor


def slice_of_rows(x):
    x[1:] = 0


def column(x):
    x[:, 0].zero_()


def row(x):
    x[2] = 5.0


def added_in_place(x):
    x[:, 1:3] += 1


def values_of_one_more_dimension(x):
    x[1:3] = (x[3:5] * 2)[None]


def transposed(x):
    x.t()[0].mul_(2)


def viewed(x):
    x.view(4, 8)[1] = 0


def element_of_flattened(x):
    x.flatten()[3] = 9.0


def diagonal(x):
    x.diagonal().zero_()


def half(x):
    x.narrow(0, 4, 4).copy_(x.narrow(0, 0, 4).clone())


WRITES = (
    *(slice_of_rows, column, row, added_in_place, values_of_one_more_dimension, transposed),
    *(viewed, element_of_flattened, diagonal, half),
)
X = torch.arange(1.0, 33.0).view(8, 4)


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__)
def test_what_is_written_is_there(ranks, write, placement):
    expected, x = X.clone(), split(X, ranks, [placement])
    write(expected)
    with dynamo_dist.enabled():
        write(x)
    assert x.placements == (placement,)
    torch.testing.assert_close(whole_tensor(x), expected)


@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__)
def test_gradients_are_those_of_what_is_left(grid, write):
    def loss(x):
        y = x * 2
        write(y)
        return (y * y).sum()

    expected = X.clone().requires_grad_()
    loss(expected).backward()
    x = split(X, grid, [Shard(0), Shard(1)]).requires_grad_()
    with dynamo_dist.enabled():
        loss(x).backward()
    torch.testing.assert_close(whole_tensor(x.grad), expected.grad)
