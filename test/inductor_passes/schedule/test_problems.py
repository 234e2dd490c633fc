"""Our rules of execution against an independent referee, on whole training graphs given as numbers.

The referee (``check.py``) and its problems are no part of this project: the folder is named by
DYNAMO_DIST_SCHEDULE_PROBLEMS, and without it these tests are skipped.
"""

import importlib.util
import os
from pathlib import Path

import pytest
from small_problems import peak_of_values

from inductor_passes.simulate.execution import Program, execute

FOLDER = os.environ.get("DYNAMO_DIST_SCHEDULE_PROBLEMS")
PROBLEMS = sorted(Path(FOLDER).glob("*.json.gz")) if FOLDER else []

pytestmark = pytest.mark.skipif(
    not PROBLEMS, reason="DYNAMO_DIST_SCHEDULE_PROBLEMS names no folder with *.json.gz problems"
)


@pytest.fixture(scope="module")
def referee():
    spec = importlib.util.spec_from_file_location("schedule_referee", Path(FOLDER) / "check.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def in_order(problem, order, link_us):
    """A problem as our program and values, its nodes renumbered by ``order``."""
    nodes = problem["nodes"]
    position = {node: i for i, node in enumerate(order)}

    def owner(node):
        while nodes[node]["alias"] is not None:
            node = nodes[node]["alias"]
        return node

    compute, channel, link, awaits, fresh, uses = [], [], [], [], [], []
    for number in order:
        node = nodes[number]
        launches = node["kind"] == "launch"
        compute.append(node["us"] if node["kind"] == "compute" else 0.0)
        channel.append(node["group"] if launches else "")
        us = link_us(problem, node["group"], node["op"], node["payload"]) if launches else 0.0
        link.append(us)
        waits = node["kind"] == "wait" and node["launch"] is not None
        awaits.append([position[node["launch"]]] if waits else [])
        counted = node["kind"] not in ("input", "output") and node["alias"] is None
        fresh.append(node["bytes"] if counted else 0)
        uses.append([position[owner(dependency)] for dependency in node["deps"]])
    return Program(compute, channel, link, awaits), fresh, uses


def launches_first(problem):
    """Another valid order: each launch as soon as its dependencies have run, waits where they
    were.
    """
    nodes = problem["nodes"]
    early, ready = {}, {}
    for number, node in enumerate(nodes):
        after = max((ready[dependency] for dependency in node["deps"]), default=-1)
        ready[number] = after if node["kind"] == "launch" else number
        early[number] = (ready[number], node["kind"] == "launch", number)
    return sorted(range(len(nodes)), key=early.__getitem__)


@pytest.mark.parametrize("path", PROBLEMS, ids=lambda path: path.name.removesuffix(".json.gz"))
@pytest.mark.parametrize("order_of", [lambda p: list(range(len(p["nodes"]))), launches_first])
def test_makespan_exposed_time_and_peak_agree(path, order_of, referee):
    problem = referee.load(str(path))
    order = order_of(problem)
    makespan, exposed, peak = referee.simulate(problem, {"order": order, "buckets": []})
    program, fresh, uses = in_order(problem, order, referee.link_us)
    ours = execute(program)
    assert ours.makespan_us == pytest.approx(makespan, rel=1e-9)
    assert ours.exposed_us == pytest.approx(exposed, rel=1e-9, abs=1e-3)
    assert peak_of_values(fresh, uses) == peak
