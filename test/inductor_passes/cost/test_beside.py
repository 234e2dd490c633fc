"""Kernels beside a collective: the stretch that explains what both take together."""

import pytest

from inductor_passes.cost.measure_device import MOST, stretch_of
from inductor_passes.simulate.execution import Program, execute


@pytest.mark.parametrize("stretch", [1.0, 1.2, 2.0, 5.0])
@pytest.mark.parametrize("alone", [80.0, 100.0, 140.0])
def test_the_simulation_takes_what_was_measured(stretch, alone):
    program = Program([0.0, alone, 0.0], ["a", "", ""], [100.0, 0.0, 0.0], [(), (), (0,)], stretch)
    both = execute(program).makespan_us
    found = stretch_of(alone, 100.0, both)
    # Compute that ends before the collective does hides how much it was slowed.
    assert found == pytest.approx(1.0 if both == 100.0 else stretch)


def test_noise_gives_no_stretch_below_one_and_none_without_end():
    assert stretch_of(100.0, 100.0, 90.0) == 1.0
    assert stretch_of(90.0, 100.0, 100.5) == pytest.approx(100 / 89.5)
    assert stretch_of(100.0, 100.0, 230.0) == MOST
