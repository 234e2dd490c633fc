"""Stretch found again in steps that were simulated with it."""

import pytest

from inductor_passes.machine.times.times import GraphTimes, LaunchTime, NodeTime
from inductor_passes.records import NodeRecord
from inductor_passes.simulate.execution import execute
from inductor_passes.tuning.stretch import _program, stretches

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
        ran = execute(_program(NODES, ["0"], times(compute, link), of_compute, of_launch))
        graphs.append((NODES, ["0"], times(compute, link, ran.exposed_us), ran.compute_us))
    assert stretches(graphs) == pytest.approx((of_compute, of_launch), abs=0.02)


def test_steps_that_were_faster_together_are_not_stretched():
    assert stretches([(NODES, ["0"], times(100.0, 300.0, 0.0), 150.0)]) == (1.0, 1.0)


def test_without_a_launch_nothing_is_stretched():
    alone = GraphTimes("forward", {"mm": NodeTime("mm", 10.0, 1.0)}, {})
    assert stretches([((NodeRecord("mm", "kernel", "mm"),), [], alone, 50.0)]) == (1.0, 1.0)
