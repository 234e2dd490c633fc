"""Two channels on one link: bytes share its rate, start-ups overlap, and one channel alone is as it was."""

import random

import pytest

from inductor_passes.schedule.model.bound import lower_bound
from inductor_passes.schedule.model.json_format import problem_of
from inductor_passes.schedule.model.judge import judge
from inductor_passes.schedule.model.limit import limit_us
from inductor_passes.schedule.model.own_bound import own_bound
from inductor_passes.schedule.model.problem import Node, Problem, program_order
from inductor_passes.schedule.model.tasks import Tasks
from inductor_passes.schedule.solver.solve import solve
from inductor_passes.simulate.execution import Program, execute
from inductor_passes.simulate.links import startup_us

MIB = 2**20
TABLE = ((0.25, 10.0), (1.0, 10.0), (2.0, 18.0), (4.0, 34.0))  # 2 + 8 a MiB, and at least 10


def two(startup, first_us, second_us, *, channels=("a", "b"), awaits=(0, 1)):
    return Program(
        compute_us=[0.0, 0.0, 5.0],
        channel=[*channels, ""],
        link_us=[first_us, second_us, 0.0],
        awaits=[(), (), awaits],
        shared={"a": "a", "b": "a"},
        startup_us={0: startup, 1: startup},
    )


def test_transfers_share_the_rate_and_start_ups_overlap():
    found = execute(two(4.0, 14.0, 24.0))
    # 4 us of both start-ups, 20 for 10 bytes of each at half the rate, 10 for what is left of the second.
    assert found.end[:2] == (24.0, 34.0)
    assert found.makespan_us == 39.0
    assert execute(two(4.0, 14.0, 24.0, channels=("a", "a"))).end[:2] == (14.0, 38.0)


def test_all_of_it_is_shared_where_nothing_is_start_up():
    found = execute(two(0.0, 10.0, 30.0))
    assert found.end[:2] == (20.0, 40.0)
    assert execute(two(0.0, 10.0, 30.0, channels=("a", "a"))).makespan_us == found.makespan_us


def test_a_launch_behind_a_wait_does_not_slow_what_was_waited_for():
    program = Program(
        compute_us=[0.0, 3.0, 0.0, 0.0],
        channel=["a", "", "b", ""],
        link_us=[10.0, 0.0, 10.0, 0.0],
        awaits=[(), (0,), (), (2,)],
        shared={"a": "a", "b": "a"},
    )
    assert execute(program).makespan_us == 23.0


def test_compute_beside_either_channel_is_stretched():
    program = two(0.0, 10.0, 10.0, awaits=())
    slowed = Program(
        program.compute_us,
        program.channel,
        program.link_us,
        program.awaits,
        2.0,
        shared=program.shared,
    )
    assert execute(slowed).compute_us == 10.0


@pytest.mark.parametrize("mib", [0.1, 0.25, 0.5, 1.0, 3.0, 9.0])
def test_a_start_up_is_no_more_than_the_floor_and_leaves_what_bytes_need(mib):
    us = 10.0 if mib <= 1 else 2 + 8 * mib
    startup = startup_us(TABLE, mib, us)
    assert 0 <= startup <= 10
    assert us - startup >= 8 * mib - 1e-9


def test_what_costs_the_same_at_all_sizes_has_no_start_up():
    assert startup_us(((1.0, 50.0), (2.0, 50.0)), 1.0, 50.0) == 0.0


def drawn(seed):
    """A problem of compute, launches on a group and its clone, and waits."""
    choose = random.Random(seed)
    nodes = [Node("x", "input")]
    for _ in range(choose.randrange(3, 9)):
        at = len(nodes)
        deps = (choose.randrange(at),) if choose.random() < 0.7 else ()
        deps = tuple(d for d in deps if nodes[d].kind != "launch")
        nodes.append(Node(f"c{at}", "compute", deps, us=choose.uniform(1, 40), bytes=8))
        group = choose.choice(("g", "clone"))
        nodes.append(
            Node(
                f"l{at}", "launch", (at,), bytes=8, group=group, op="all_reduce", dtype="f", reduce="sum",
                payload=choose.randrange(1, 4 * MIB),
            )
        )  # fmt: skip
        nodes.append(Node(f"w{at}", "wait", (at + 1,), alias=at + 1, launch=at + 1))
        if choose.random() < 0.5:
            nodes.append(Node(f"r{at}", "compute", (at + 2,), us=choose.uniform(1, 40), bytes=8))
    nodes.append(Node("out", "output", tuple(range(1, len(nodes)))))
    table = {"all_reduce": TABLE}
    shared = {"clone": "g"}
    return Problem(str(seed), tuple(nodes), {"g": table, "clone": table}, 1e6, dict.fromkeys(("g", "clone"), 4), shared=shared)  # fmt: skip


@pytest.mark.parametrize("seed", range(60))
def test_bounds_and_limit_hold_for_what_is_judged(seed):
    problem = drawn(seed)
    found = solve(problem)
    least = min(found.makespan_us, judge(problem, program_order(problem)).makespan_us)
    assert lower_bound(problem).us <= least + 1e-6
    assert own_bound(Tasks(problem), "default").us <= least + 1e-6
    assert limit_us(problem) <= least + 1e-6
    # The link is one machine, whichever channel its launches are on: apart, they would be bound by less.
    link = lower_bound(problem).by_resource
    assert "group clone" not in link


def test_a_clone_survives_json():
    data = {
        "name": "p", "nodes": [{"kind": "launch", "deps": [], "us": 0, "bytes": 1, "group": "c", "op": "all_reduce", "dtype": "f", "payload": 4}],
        "links": {"c": {"all_reduce": [[1, 2.0], [2, 3.0]]}}, "copy_bytes_per_us": 1, "group_size": {"c": 2}, "shared": {"c": "g"},
    }  # fmt: skip
    assert problem_of(data).link_of("c") == "g"
