"""Launches that start earlier, and waits that come later, in the memory that a schedule leaves."""

from hypothesis import given, settings
from small_problems import (
    MIB,
    compute,
    launch,
    node_input,
    output,
    problem,
    problems,
    wait,
)

from inductor_passes.schedule.solver.evaluate import evaluate
from inductor_passes.schedule.solver.problem import Schedule, program_order
from inductor_passes.schedule.solver.slack import with_slack_used


def used(of, cap_bytes, schedule=None):
    schedule = schedule or program_order(of)
    return with_slack_used(of, schedule, evaluate(of, schedule), cap_bytes)


def resharded(count, us=10.0):
    """Layers that gather a weight each; the loss at the end holds more than any of them."""
    nodes = [node_input() for _ in range(count)]
    last = None
    for i in range(count):
        start = len(nodes)
        nodes.append(launch(i, size=MIB))
        nodes.append(wait(start, i))
        nodes.append(compute(us, start + 1, *([] if last is None else [last]), size=MIB))
        last = start + 2
    nodes.append(compute(us, last, size=8 * MIB))
    nodes.append(output(len(nodes) - 1))
    return problem(*nodes)


def test_gathers_go_ahead_below_a_peak_that_stands_elsewhere():
    of = resharded(6)
    before = evaluate(of, program_order(of))
    _, after = used(of, before.peak_bytes)
    assert after.peak_bytes <= before.peak_bytes
    # All but the first are behind compute of as long.
    assert after.makespan_us == before.makespan_us - 5 * 10.0


def test_a_cap_at_each_place_moves_nothing():
    nodes = [node_input(), node_input(), launch(0, size=MIB), wait(2, 0)]
    nodes += [compute(10.0, 3, size=4 * MIB), launch(1, size=4 * MIB), wait(5, 1)]
    nodes += [compute(10.0, 4, 6), output(7)]
    of = problem(*nodes)
    schedule, _ = used(of, evaluate(of, program_order(of)).peak_bytes - MIB)
    assert schedule == program_order(of)


def test_what_only_a_launch_needs_goes_with_it():
    nodes = [node_input(), compute(20.0, 0, size=MIB), compute(1.0, 0, size=MIB), launch(2)]
    of = problem(*nodes, wait(3, 2), compute(5.0, 1, 4), output(5))
    schedule, after = used(of, 2**40)
    assert schedule.order.index(2) < schedule.order.index(1)
    assert after.exposed_us == 0


def test_a_wait_comes_down_to_its_reader():
    nodes = [node_input(), compute(5.0, 0, size=MIB), launch(1, op="reduce_scatter")]
    of = problem(*nodes, wait(2, 1), compute(30.0, 1), compute(1.0, 3, 4), output(5))
    _, after = used(of, 2**40)
    assert after.exposed_us == 0


def test_members_of_a_bucket_stay_together():
    nodes = [node_input(), node_input(), node_input(), launch(0), launch(1), wait(3), wait(4)]
    nodes += [compute(20.0, 5, 6), launch(2), wait(8), compute(1.0, 7, 9), output(10)]
    of = problem(*nodes)
    bucketed = Schedule(program_order(of).order, ((3, 4),))
    schedule, after = used(of, 2**40, bucketed)
    assert schedule.buckets == bucketed.buckets
    assert after.makespan_us < evaluate(of, bucketed).makespan_us


@settings(max_examples=300, deadline=None)
@given(problems())
def test_nothing_gets_longer_or_takes_more_than_the_cap(of):
    before = evaluate(of, program_order(of))
    for cap in (before.peak_bytes, before.peak_bytes + MIB, 2**50):
        schedule, after = used(of, cap)
        assert after == evaluate(of, schedule)
        assert after.makespan_us <= before.makespan_us
        assert after.peak_bytes <= cap
