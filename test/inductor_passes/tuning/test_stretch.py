"""Stretch found again in steps that were simulated with it."""

import dataclasses

import pytest

from inductor_passes.machine.times.times import GraphTimes, LaunchTime, NodeTime
from inductor_passes.records import NodeRecord
from inductor_passes.simulate.execution import execute
from inductor_passes.tuning.stretch import Beside, beside, program_of, stretches

NODES = (
    NodeRecord("launch", "launch", "all_gather", 0.0, 0),
    NodeRecord("mm", "kernel", "mm"),
    NodeRecord("wait", "wait", "wait", 0.0, 0),
    NodeRecord("mm_1", "kernel", "mm"),
)


def times(compute, link, waited=0.0):
    return GraphTimes(
        "forward",
        {name: NodeTime("mm", compute, 1.0) for name in ("mm", "mm_1")},
        {"launch": LaunchTime("all_gather", 2, 1, 1024, link, 1.0)},
        waited,
    )


@pytest.mark.parametrize(
    ("of_compute", "of_launch"), [(1.0, 1.0), (1.3, 1.0), (1.0, 1.5), (1.4, 1.6)]
)
def test_both_factors_come_back(of_compute, of_launch):
    graphs = []
    for compute, link in ((100.0, 300.0), (250.0, 120.0)):
        one = graph(NODES, ["0"], ["within"], times(compute, link))
        ran = execute(program_of(one, {"within": of_compute}, {"within": of_launch}))
        graphs.append(
            dataclasses.replace(
                one, computed_us=ran.compute_us, waited_us={"within": ran.exposed_us}
            )
        )
    found = stretches(graphs)
    assert found.of_compute["within"] == pytest.approx(of_compute, abs=0.02)
    assert found.of_launch["within"] == pytest.approx(of_launch, abs=0.02)


def graph(nodes, groups, links, times, computed=0.0, waited=0.0):
    return Beside(nodes, groups, links, links, times, computed, {}, dict.fromkeys(links, waited))


def test_each_kind_of_link_gets_its_own_factors_back():
    nodes = tuple(
        dataclasses.replace(node, name=f"{node.name}{i}", number=i if node.number == 0 else -1)
        for i in range(3)
        for node in NODES
    )
    own = {"within": (1.5, 1.2), "between": (1.1, 1.8)}
    links = ["within", "between", "within"]
    table = GraphTimes(
        "forward",
        {n.name: NodeTime("mm", 100.0, 1.0) for n in nodes if n.event == "kernel"},
        {
            n.name: LaunchTime("all_gather", 2, 1, 1024, 130.0, 1.0)
            for n in nodes
            if n.event == "launch"
        },
    )
    one = graph(nodes, ["a", "b", "a"], links, table)
    factors = [{kind: both[i] for kind, both in own.items()} for i in range(2)]
    ran = execute(program_of(one, *factors))
    waited = {
        kind: sum(
            ran.exposed[i]
            for i, n in enumerate(nodes)
            if n.event == "launch" and links[n.number] == kind
        )
        for kind in own
    }
    computed = {
        kind: sum(ran.end[i] - ran.start[i] for i in at)
        for kind, at in beside(nodes, links).items()
    }
    found = stretches(
        [
            dataclasses.replace(
                one, computed_us=ran.compute_us, computed_beside_us=computed, waited_us=waited
            )
        ]
    )
    for kind, (of_compute, of_launch) in own.items():
        assert found.of_compute[kind] == pytest.approx(of_compute, abs=0.02)
        assert found.of_launch[kind] == pytest.approx(of_launch, abs=0.02)


def test_each_sort_of_launches_gets_its_own_factor_back():
    graphs, own = [], {"gather": 1.1, "exchange": 2.5}
    for sort, factor in own.items():
        one = dataclasses.replace(
            graph(NODES, ["0"], ["within"], times(100.0, 300.0)), sorts=[sort]
        )
        ran = execute(program_of(one, {"within": 1.2}, {sort: factor}))
        graphs.append(
            dataclasses.replace(one, computed_us=ran.compute_us, waited_us={sort: ran.exposed_us})
        )
    assert stretches(graphs).of_launch == pytest.approx(own, abs=0.03)


def test_steps_that_were_faster_together_are_not_stretched():
    found = stretches([graph(NODES, ["0"], ["within"], times(100.0, 300.0), 150.0)])
    assert (found.of_compute, found.of_launch) == ({"within": 1.0}, {"within": 1.0})


def test_without_a_launch_nothing_is_stretched():
    alone = GraphTimes("forward", {"mm": NodeTime("mm", 10.0, 1.0)}, {})
    assert (
        stretches([graph((NodeRecord("mm", "kernel", "mm"),), [], [], alone, 50.0)]).of_launch == {}
    )
