import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_problems import compute, launch, node_input, optimum, output, problem, problems, wait

from inductor_passes.schedule.solver.lower_bound import (
    least_us_per_mib,
    lower_bound,
    one_machine_bound,
    own_bound,
)
from inductor_passes.schedule.solver.tasks import Tasks

EPSILON = 1e-6


@pytest.mark.parametrize(
    ("jobs", "bound"),
    [
        ([], 0.0),
        ([(0.0, 5.0, 0.0), (0.0, 5.0, 0.0)], 10.0),
        ([(3.0, 2.0, 4.0)], 9.0),
        # The long tail goes first, and interrupts the job that was there before it.
        ([(0.0, 10.0, 0.0), (2.0, 2.0, 9.0)], 13.0),
    ],
)
def test_one_machine(jobs, bound):
    assert one_machine_bound(jobs) == bound


TIMES = st.one_of(st.sampled_from([0.0, 1.0, 2.0]), st.floats(0.0, 3.0))
JOBS = st.tuples(TIMES, TIMES, TIMES)


@given(JOBS, JOBS)
def test_two_jobs_are_bounded_as_among_more(first, second):
    nothing = (0.0, 0.0, 0.0)
    among = one_machine_bound([first, second, nothing])
    assert one_machine_bound([first, second]) == pytest.approx(among, rel=1e-12)


def test_the_best_rate_of_a_link_counts_its_floor_and_its_slopes():
    assert least_us_per_mib(((1.0, 10.0), (2.0, 12.0), (4.0, 20.0))) == 2.0
    assert least_us_per_mib(((4.0, 4.0), (5.0, 9.0))) == 1.0


@settings(max_examples=60)
@given(problems(most=4))
def test_no_schedule_is_shorter_than_either_bound(of):
    best = optimum(of, cap_bytes=1 << 60)
    assert lower_bound(of).us <= best + EPSILON
    assert own_bound(Tasks(of), nearest=64).us <= best + EPSILON


def two_products_for_one_collective():
    """Both products must run before the scatter, which the longest path does not see."""
    return problem(
        node_input(), compute(10.0, 0), compute(20.0, 1), compute(20.0, 1), compute(1.0, 2, 3),
        launch(4, op="reduce_scatter"), wait(5), output(6),
    )  # fmt: skip


def test_our_own_bound_sees_what_the_path_does_not():
    of = two_products_for_one_collective()
    assert lower_bound(of).by_resource["path"] == 10 + 20 + 1 + 10
    assert own_bound(Tasks(of), nearest=64).us == 10 + 20 + 20 + 1 + 10 == optimum(of, 1 << 60)


def test_independent_compute_does_not_lengthen_its_reader():
    # The cast (node 1) can run while the gather is on the wire.
    of = problem(
        node_input(), compute(0.001, 0), launch(0), wait(2), compute(50.0, 1, 3), output(4)
    )  # fmt: skip
    assert own_bound(Tasks(of), nearest=64).us == 60.0 == pytest.approx(optimum(of, 1 << 60))
