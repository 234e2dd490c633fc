import random

import pytest
from small_problems import MIB, compute, launch, layers, node_input, output, problem, wait

from inductor_passes.errors import ProblemError
from inductor_passes.schedule.solver.evaluate import evaluate
from inductor_passes.schedule.solver.problem import Schedule, program_order
from inductor_passes.schedule.solver.solve import solve


def two_gathers(copy_bytes_per_us=1e12):
    """Two gathers of 1 MiB that two products read: 0 input; 1, 2 and 3, 4 gathers; 5, 6
    products.
    """
    return problem(
        node_input(),
        launch(0, size=4 * MIB), wait(1),
        launch(0, size=4 * MIB), wait(3),
        compute(10.0, 2, size=MIB), compute(10.0, 4, 5, size=MIB),
        output(6),
        copy_bytes_per_us=copy_bytes_per_us,
    )  # fmt: skip


def test_program_order_waits_for_each():
    evaluated = evaluate(two_gathers(), program_order(two_gathers()))
    assert evaluated.makespan_us == 40.0
    assert evaluated.exposed_by_launch == {1: 10.0, 3: 10.0}
    # Both gathers, then the second is still there beside both products.
    assert evaluated.peak_bytes == 9 * MIB


def test_a_gather_hides_under_a_product():
    evaluated = evaluate(two_gathers(), Schedule((0, 1, 3, 2, 5, 4, 6, 7)))
    assert evaluated.makespan_us == 30.0
    assert evaluated.exposed_us == 10.0
    assert (evaluated.start_us[3], evaluated.end_us[3]) == (10.0, 20.0)


def test_a_bucket_costs_one_launch_and_its_copies():
    rate = 2 * MIB / 4.0  # 2 MiB of payload: 8 us to pack; 8 MiB of results: 32 us to unpack
    evaluated = evaluate(two_gathers(rate), Schedule((0, 1, 3, 2, 4, 5, 6, 7), ((1, 3),)))
    assert evaluated.makespan_us == pytest.approx(8 + 15 + 32 + 20)
    assert evaluated.exposed_by_launch == {1: 15.0}
    assert evaluated.peak_bytes == 10 * MIB  # both results and the packed copy


BROKEN = {
    "The order does not hold every node exactly once.": Schedule((0, 1, 2, 3, 4, 5, 6)),
    "Node 2 stands before its dependency 1.": Schedule((0, 2, 1, 3, 4, 5, 6, 7)),
    "Bucket 0 holds node 5, which is no launch.": Schedule(tuple(range(8)), ((5, 1),)),
    "Launch 1 is in two buckets.": Schedule((0, 1, 3, 2, 4, 5, 6, 7), ((1, 3), (1,))),
    "The members of bucket 0 do not stand next to each other.": Schedule(
        tuple(range(8)), ((1, 3),)
    ),
    "The waits of bucket 0 do not stand next to each other.": Schedule(
        (0, 1, 3, 2, 5, 4, 6, 7), ((1, 3),)
    ),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_schedules_are_refused(message):
    with pytest.raises(ProblemError) as caught:
        evaluate(two_gathers(), BROKEN[message])
    assert str(caught.value) == message


def test_a_bucket_of_different_groups_is_refused():
    mixed = problem(
        node_input(), launch(0), launch(0, group="b"), wait(1), wait(2), output(3, 4)
    )  # fmt: skip
    with pytest.raises(ProblemError, match="mixes groups"):
        evaluate(mixed, Schedule(tuple(range(6)), ((1, 2),)))


def test_a_bucket_along_a_path_is_refused():
    chained = problem(node_input(), launch(0), launch(1), wait(1), wait(2), output(3, 4))
    with pytest.raises(ProblemError, match="Launch 2 depends on another launch of its bucket"):
        evaluate(chained, Schedule(tuple(range(6)), ((1, 2),)))


def break_order(rng, of, order):
    """Two neighbours in the wrong order, one node twice, or one missing."""
    position = {i: p for p, i in enumerate(order)}
    i = rng.choice([i for i in order if of.nodes[i].deps])
    kind = rng.randrange(3)
    if kind == 0:
        order.insert(position[rng.choice(of.nodes[i].deps)], order.pop(position[i]))
    elif kind == 1:
        order.remove(i)
    else:
        order.append(i)
    return order


@pytest.mark.parametrize("seed", range(200))
def test_mutated_solutions_are_refused(seed):
    of = layers(6)
    solution = solve(of)
    evaluate(of, solution.schedule)
    order = break_order(random.Random(seed), of, list(solution.order))
    with pytest.raises(ProblemError):
        evaluate(of, Schedule(tuple(order), solution.buckets))
