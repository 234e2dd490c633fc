"""Steps that took much longer, and whose fault it was."""

import pytest

from inductor_passes.tuning.outliers import Outlier, outliers

USUAL = [100.0] * 6


def with_one(step, us):
    return [*USUAL[:step], us, *USUAL[step + 1 :]]


def test_a_step_is_named_with_the_rank_that_computed_longer():
    took = {0: with_one(2, 300.0), 1: with_one(2, 300.0)}
    computed = {0: [60.0] * 6, 1: [*[60.0] * 2, 250.0, *[60.0] * 3]}
    assert outliers(took, computed) == (Outlier(2, pytest.approx(3.0), 1),)


def test_a_step_whose_link_was_slow_is_nobodys():
    assert outliers({0: with_one(4, 200.0)}, {0: [60.0] * 6}) == (Outlier(4, 2.0, None),)


def test_noise_and_few_steps_are_none():
    assert outliers({0: with_one(1, 140.0)}, {0: USUAL}) == ()
    assert outliers({0: [1.0, 9.0]}, {0: [1.0, 9.0]}) == ()
    assert outliers({}, {}) == ()
