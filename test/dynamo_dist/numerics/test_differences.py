import math

import pytest
import torch

from dynamo_dist.numerics.differences import TOLERANCES, distance


def test_equal_tensors_are_zero_apart():
    a = torch.tensor([1.0, math.nan, math.inf])
    found = distance({"a": a}, {"a": a.clone()})
    assert (found.largest, found.within) == (0.0, True)


def test_largest_and_its_tensor():
    expected = {"a": torch.zeros(3), "b": torch.zeros(2)}
    actual = {"a": torch.tensor([0.0, 1e-6, 0.0]), "b": torch.tensor([0.0, -2e-6])}
    found = distance(expected, actual)
    assert found.worst == "b" and found.largest == pytest.approx(2e-6)
    assert found.within


def test_beyond_tolerance_in_one_element():
    expected = {"a": torch.ones(4)}
    actual = {"a": torch.tensor([1.0, 1.0, 1.0, 1.01])}
    assert not distance(expected, actual).within
    assert distance(expected, actual, rtol=0.02).within
    assert distance(expected, actual, rtol=0.0, atol=0.011).within


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_one_rounding_is_within_tolerance_of_each_dtype(dtype):
    one = torch.ones(3, dtype=dtype)
    found = distance({"a": one}, {"a": one + torch.finfo(dtype).eps})
    assert found.largest > 0 and found.within


def test_integers_must_be_equal():
    found = distance({"a": torch.tensor([1, 2])}, {"a": torch.tensor([1, 3])})
    assert found.largest == 1.0 and not found.within


@pytest.mark.parametrize(
    ("actual", "worst"),
    [
        ({}, "a (only in eager)"),
        ({"a": torch.zeros(2)}, "a (torch.float32 [2], expected torch.float32 [3])"),
        ({"a": torch.zeros(3).double()}, "a (torch.float64 [3], expected torch.float32 [3])"),
        ({"a": torch.full((3,), math.nan)}, "a"),
    ],
)
def test_what_cannot_be_compared_is_infinitely_far(actual, worst):
    found = distance({"a": torch.zeros(3)}, actual)
    assert (found.largest, found.worst, found.within) == (math.inf, worst, False)


def test_empty_tensors_agree():
    assert distance({"a": torch.zeros(0, 3)}, {"a": torch.zeros(0, 3)}).within
