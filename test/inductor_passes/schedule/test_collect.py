import dataclasses

import pytest
from small_problems import MIB, compute, launch, node_input, output, problem, wait

from inductor_passes.schedule.solver.bucketing import (
    Collector,
    Merger,
    enough_for,
    link_us_in_buckets,
)
from inductor_passes.schedule.solver.evaluate import evaluate
from inductor_passes.schedule.solver.list_scheduler import PORTFOLIO
from inductor_passes.schedule.solver.search import Search
from inductor_passes.schedule.solver.solve import solve
from inductor_passes.schedule.solver.tasks import Tasks

# 90 us whatever is sent, and 10 us a MiB: sixteen launches of 1 MiB take 1600 us apart, 250 as one.
LONG_FLOOR = ((1.0, 100.0), (2.0, 110.0))
KEY = ("a", "reduce_scatter", "bf16", "sum")


def on_link(link, *nodes):
    links = {"a": {"all_gather": link, "reduce_scatter": link}}
    return dataclasses.replace(problem(*nodes), links=links)


def scatters(layers=16, size=0, link=LONG_FLOOR):
    """A product a layer, and a scatter of what it makes that nobody needs before the end."""
    nodes, last, ends = [node_input()], 0, []
    for _ in range(layers):
        at = len(nodes)
        nodes += [compute(40.0, last, size=size), launch(at, op="reduce_scatter"), wait(at + 1)]
        last = at
        ends.append(at + 2)
    return on_link(link, *nodes, output(*ends))


def gathers_and_scatters(layers=16):
    """The same, and each product reads a weight that is gathered first."""
    nodes, ends = [node_input() for _ in range(layers)], []
    for i in range(layers):
        at = len(nodes)
        before = (at - 3,) if i else ()
        nodes += [launch(i, size=4 * MIB), wait(at), compute(40.0, at + 1, *before, size=MIB)]
        nodes += [launch(at + 2, op="reduce_scatter"), wait(at + 3)]
        ends.append(at + 4)
    return on_link(LONG_FLOOR, *nodes, output(*ends))


def enough(of, busy_us):
    tasks = Tasks(of)
    return enough_for(tasks, Merger(tasks), busy_us)


def test_buckets_are_as_large_as_the_channel_needs():
    # 160 us for the bytes leave room for five floors of 90 us.
    assert enough(scatters(), 640.0) == {KEY: 16 * MIB // 5}
    assert enough(scatters(), 50.0) == {KEY: 16 * MIB}


@pytest.mark.parametrize("link", [((1.0, 10.0), (2.0, 20.0)), ((1.0, 1000.0), (2.0, 2000.0))])
def test_nothing_waits_where_the_channel_keeps_up(link):
    assert enough(scatters(link=link), 640.0) == {}


def test_one_launch_waits_for_nobody():
    assert enough(scatters(layers=1), 10.0) == {}


def test_a_launch_is_priced_as_its_part_of_a_bucket():
    tasks = Tasks(scatters())
    each = link_us_in_buckets(tasks, Merger(tasks), {KEY: 4 * MIB})
    assert [us for us in each if us] == [(90 + 40) / 4] * 16
    assert link_us_in_buckets(tasks, Merger(tasks), {}) == tasks.link_us


def test_the_collector_gives_back_what_is_enough_or_due():
    held = Collector({KEY: 3 * MIB})
    assert not held
    assert held.add(KEY, (20.0, 1), MIB) == []
    assert held.due(19.0) == []
    assert held
    assert held.due(20.0) == [(20.0, 1)]
    assert not held
    assert held.add(KEY, (9.0, 2), MIB) == held.add(KEY, (8.0, 3), MIB) == []
    assert held.add(KEY, (7.0, 4), MIB) == [(7.0, 4), (8.0, 3), (9.0, 2)]
    assert held.add(KEY, (1.0, 5), MIB) == []
    assert held.release() == [(1.0, 5)]
    assert held.release() == []


def test_scatters_make_way_for_gathers():
    of = gathers_and_scatters()
    found = solve(of, extra_memory_ratio=0.0, extra_memory_bytes=16 * MIB)
    search = Search(Tasks(of), found.cap_bytes, found.bound_us, merges=True)
    plain = [search.candidate_by(rules).candidate for rules in PORTFOLIO if not rules.busy]
    best = min(
        candidate.makespan_us for candidate in plain if candidate.peak_bytes <= found.cap_bytes
    )
    assert found.makespan_us < 0.9 * best


def test_what_waits_keeps_to_the_cap():
    of = scatters(size=MIB)
    found = solve(of, extra_memory_ratio=0.0, extra_memory_bytes=3 * MIB)
    assert evaluate(of, found.schedule).peak_bytes <= found.cap_bytes
    assert found.makespan_us < found.original_makespan_us
    # Nothing is merged, so nothing waits.
    assert solve(of, bucket=False).buckets == ()
