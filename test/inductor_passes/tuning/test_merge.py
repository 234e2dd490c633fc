"""Clocks of several ranks, made up so that the truth is known."""

import dataclasses

import pytest

from inductor_passes.machine.times.times import GraphTimes, LaunchTime, NodeTime
from inductor_passes.records import NodeRecord
from inductor_passes.tuning.layout import layout_of
from inductor_passes.tuning.merge import (
    RankCalls,
    early_us,
    graph_times,
    offsets,
    stragglers,
    waited_us,
)
from inductor_passes.tuning.table import as_it_ran

EVENTS = ("kernel", "launch all_reduce", "kernel", "wait 0", "kernel")
NODES = (
    NodeRecord("mm", "kernel", "mm", 1.0),
    NodeRecord("reduce", "launch", "all_reduce", 5.0, 0),
    NodeRecord("mm_1", "kernel", "mm", 1.0),
    NodeRecord("wait", "wait", "wait", 0.0, 0),
    NodeRecord("mm_2", "kernel", "mm", 1.0),
    NodeRecord("relu", "compute", "relu", 1.0),
)
LAYOUT = layout_of(NODES, EVENTS)
LINK = 400e-6
US = 1e-6


@pytest.fixture
def record(graph):
    return graph(nodes=NODES)


def call(compute, came_last, start=0.0):
    """One call with launches alone: ``compute`` seconds of each product, then 10 us of relu."""
    t, marks = start, [start]
    for event in EVENTS:
        marks.append(t)
        if event == "kernel":
            t += compute
        elif event.startswith("launch"):
            t = came_last + start + LINK
        marks.append(t)
    return [*marks, t + 10 * US]


def scheduled(start=0.0):
    """One call as scheduled: launching takes 30 us of the host, waiting 100 us."""
    t, marks = start, [start]
    for event in EVENTS:
        marks.append(t)
        t += {"kernel": 50, "launch": 30, "wait": 100}[event.split()[0]] * US
        marks.append(t)
    return [*marks, t]


def begun_early(marks, early):
    """A scheduled call that began so many seconds earlier, and waited for as much longer."""
    waited = 2 + 2 * EVENTS.index("wait 0")
    return [mark - early if at < waited else mark for at, mark in enumerate(marks)]


def slower(marks):
    """A scheduled call that computes 600 us more before it launches."""
    return [marks[0], *(mark + 600 * US for mark in marks[1:])]


def ranks(*computes, clocks=(0.0, 0.0, 0.0, 0.0)):
    last, members = max(computes), tuple(range(len(computes)))
    return {
        rank: RankCalls(
            tuple(call(us, last, start=clocks[rank] + step) for step in range(5)),
            tuple(scheduled() for _ in range(5)),
            (members,),
        )
        for rank, us in enumerate(computes)
    }


LAUNCHED = [LaunchTime("all_reduce", 2, 1, 4096, 0.0, 0.0)]


def test_compute_is_the_slowest_ranks_and_a_launch_begins_with_the_last(record):
    times = graph_times(record, LAYOUT, ranks(100 * US, 300 * US), LAUNCHED)
    found = {name: node.us for name, node in times.nodes.items()}
    # The host's 30 us of launching are compute of what comes next.
    assert found == pytest.approx({"mm": 300.0, "mm_1": 330.0, "mm_2": 300.0, "relu": 10.0})
    assert times.launches["reduce"].us == pytest.approx(1e6 * LINK)
    assert times.launches["reduce"].payload_bytes == 4096
    assert times.launches["reduce"].predicted_us == 5.0
    assert times.waited_us == pytest.approx(100.0)


def test_clocks_of_other_hosts_do_not_matter(record):
    apart = ranks(100 * US, 300 * US, clocks=(0.0, 12345.678))
    times = graph_times(record, LAYOUT, apart, LAUNCHED)
    # The rank that came first knows no better than that the other came in between.
    assert 1e6 * LINK <= times.launches["reduce"].us <= 1e6 * LINK + 101


@pytest.mark.parametrize("clock", [0.0, 777.25])
def test_a_rank_that_begins_early_waits_for_the_others_and_not_for_the_link(clock):
    even = ranks(100 * US, 100 * US, clocks=(0.0, clock))
    uneven = {
        0: dataclasses.replace(
            even[0], scheduled=tuple(begun_early(each, 2000 * US) for each in even[0].scheduled)
        ),
        1: dataclasses.replace(
            even[1],
            scheduled=tuple([clock + mark for mark in each] for each in even[1].scheduled),
        ),
    }
    early = early_us(LAYOUT, uneven)
    # Of clocks that show other times, all that is known is that the launch took 400 us.
    assert early[0] == pytest.approx([2000.0] * 5, abs=1 if clock == 0.0 else 201)
    assert early[1] == [0.0] * 5
    assert waited_us(LAYOUT, uneven, ["link"])["link"] == pytest.approx(
        waited_us(LAYOUT, even, ["link"])["link"], abs=1 if clock == 0.0 else 201
    )


def test_a_rank_that_computes_less_waits_for_the_one_that_computes_longest():
    even = ranks(100 * US, 100 * US)
    slow = dataclasses.replace(even[1], scheduled=tuple(map(slower, even[1].scheduled)))
    waits = []
    for marks in even[0].scheduled:  # whose end it waits for
        waited = 2 + 2 * EVENTS.index("wait 0")
        waits.append([mark + 600 * US if at >= waited else mark for at, mark in enumerate(marks)])
    quick = dataclasses.replace(even[0], scheduled=tuple(waits))
    assert waited_us(LAYOUT, {0: quick, 1: slow}, ["link"])["link"] == pytest.approx(100.0)


def test_a_rank_waits_no_less_than_nothing():
    uneven = ranks(100 * US, 100 * US)
    late = tuple([5.0 + mark for mark in each] for each in uneven[1].scheduled)
    first = tuple(map(slower, uneven[0].scheduled))
    for rank, calls in enumerate((first, late)):
        uneven[rank] = dataclasses.replace(uneven[rank], scheduled=calls)
    assert waited_us(LAYOUT, uneven, ["link"])["link"] == 0.0


def test_meetings_of_another_group_say_nothing_of_two_clocks():
    """Ranks 0 and 1 are in one group, and each in a group with another rank of the other host too."""
    given = ranks(100 * US, 100 * US)
    apart = {rank: dataclasses.replace(each, members=((0, 1),)) for rank, each in given.items()}
    assert early_us(LAYOUT, apart) == {0: [0.0] * 5, 1: [0.0] * 5}
    alone = {
        rank: dataclasses.replace(each, members=((rank, rank + 2),)) for rank, each in given.items()
    }
    late = tuple([5.0 + mark for mark in each] for each in alone[1].scheduled)
    alone[1] = dataclasses.replace(alone[1], scheduled=late)
    assert early_us(LAYOUT, alone) == {0: [0.0] * 5, 1: [0.0] * 5}


def test_offsets_of_one_host_are_none_and_of_others_lie_between_bounds():
    here = {(0, 0): (1.0, 2.0)}
    assert offsets({0: here, 1: {(0, 0): (1.5, 2.0)}}) == {0: 0.0, 1: 0.0}
    found = offsets({0: here, 1: {(0, 0): (101.0, 102.0)}})
    assert found[1] == pytest.approx(-100.0)


def test_a_step_that_stood_still_once_does_not_count(record):
    given = ranks(100 * US, 100 * US)
    given[0].alone[2][1:] = [mark + 1.0 for mark in given[0].alone[2][1:]]
    times = graph_times(record, LAYOUT, given, LAUNCHED)
    assert times.nodes["mm"].us == pytest.approx(100.0)


def test_a_straggler_is_named_by_rank_and_nobody_else():
    assert stragglers(LAYOUT, ranks(100 * US, 102 * US, 101 * US)) == {}
    (rank, factor), *others = stragglers(LAYOUT, ranks(100 * US, 150 * US, 101 * US)).items()
    assert rank == 1 and not others
    assert factor == pytest.approx(1.46, abs=0.05)


def test_a_rank_whose_host_does_something_else_for_most_of_its_calls_is_no_straggler():
    given = ranks(100 * US, 102 * US)
    for call in (0, 2, 3):  # of five
        given[0].alone[call][1:] = [mark + 500 * US for mark in given[0].alone[call][1:]]
    assert stragglers(LAYOUT, given) == {}


def test_what_a_pass_made_has_no_row(record):
    made = dataclasses.replace(NODES[-1], original=False)
    of_passes = dataclasses.replace(record, nodes=(*NODES[:-1], made))
    times = graph_times(of_passes, LAYOUT, ranks(100 * US, 100 * US), LAUNCHED)
    assert set(times.nodes) == {"mm", "mm_1", "mm_2"}


def test_compute_is_no_more_than_a_step_has_where_ranks_are_late_in_turn():
    nodes = {"mm": NodeTime("mm", 60.0, 1.0), "relu": NodeTime("relu", 40.0, 1.0)}
    times = GraphTimes("forward", nodes, {})
    ran = as_it_ran(times, 50.0)
    assert {name: node.us for name, node in ran.nodes.items()} == {"mm": 30.0, "relu": 20.0}
    assert as_it_ran(times, 130.0) is times  # what collectives cost compute, stretch says
    assert as_it_ran(times, 0.0) is times  # no scheduled call was timed
