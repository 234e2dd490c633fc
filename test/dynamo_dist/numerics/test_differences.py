"""How far two results are from each other."""

import pytest
import torch

from dynamo_dist.numerics.differences import how_far


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_may_round_to_the_next_value(dtype):
    value = torch.tensor([1.0, -3.5, 20.0]).to(dtype)
    beside = (value.view(torch.uint8) + 1).view(dtype)
    assert how_far(value, beside) == ""
    assert how_far(value, (-value.float()).to(dtype)).startswith("values differ by at most")


def test_whole_numbers_are_equal_or_counted():
    assert how_far(torch.arange(3), torch.arange(3)) == ""
    assert how_far(torch.arange(3), torch.tensor([0, 1, 3])) == "1 values differ"
