"""Equal layers once: what is left of a problem, and that a search on it is a hint for the whole."""

import dataclasses
import sys
from pathlib import Path
from unittest import mock

import pytest

from inductor_passes.schedule.model.check import check_problem
from inductor_passes.schedule.model.folded import FEWEST_LAYERS, FEWEST_NODES, folded
from inductor_passes.schedule.model.judge import judge
from inductor_passes.schedule.model.problem import MIB, Node, Problem
from inductor_passes.schedule.model.repeats import left_out, stretches
from inductor_passes.schedule.solver import search, solve

sys.path.insert(0, str(Path(__file__).parents[4] / "tools" / "bench"))
from schedule_scaling import layered

LAYER = 40  # nodes


def test_a_few_layers_are_left_and_they_are_a_problem():
    whole = layered(20_000)
    few = folded(whole)
    check_problem(few)
    layers = sum(node.name == "norm" for node in few.nodes)
    assert FEWEST_NODES / LAYER <= layers <= FEWEST_NODES / LAYER + 3
    # Of each layer all is there, inputs too; and nothing reads what is gone.
    assert len(few.nodes) == pytest.approx(layers * len(whole.nodes) / 500, rel=0.01)
    for kind in ("launch", "wait"):
        assert sum(node.kind == kind for node in few.nodes) == 9 * layers
    assert [node.name for node in few.nodes if node.kind == "output"] == ["output"]


def test_every_node_costs_what_it_did_and_reads_what_its_like_does():
    whole, few = layered(20_000), folded(layered(20_000))

    def said(problem):
        names = [
            node.name.split("_")[0] if node.kind == "input" else node.name for node in problem.nodes
        ]
        return {
            (names[i], node.us, node.bytes, node.payload, *(names[d] for d in node.deps))
            for i, node in enumerate(problem.nodes)
            if node.kind != "output"
        }

    assert said(few) == said(whole)


@pytest.mark.parametrize("of", [Problem("empty", (), {}, 1.0, {}), layered(2_000), layered(6_000)])
def test_where_little_would_be_left_out_nothing_is(of):
    assert folded(of) is None


def test_layers_that_differ_are_not_equal():
    whole = layered(20_000)
    nodes = [
        dataclasses.replace(node, us=node.us + i) if node.name == "mm_data" else node
        for i, node in enumerate(whole.nodes)
    ]
    assert folded(dataclasses.replace(whole, nodes=tuple(nodes))) is None


def test_an_input_that_is_a_view_stays_one_that_names_nothing_gone():
    whole = layered(20_000)
    inputs = Node("base", "input", bytes=MIB), Node("part", "input", alias=0)
    shifted = [
        dataclasses.replace(
            node,
            deps=tuple(d + 2 for d in node.deps),
            alias=None if node.alias is None else node.alias + 2,
            launch=None if node.launch is None else node.launch + 2,
        )
        for node in whole.nodes
    ]
    last = dataclasses.replace(shifted[-1], deps=(1, *shifted[-1].deps))
    check_problem(folded(dataclasses.replace(whole, nodes=(*inputs, *shifted[:-1], last))))


def test_layers_are_left_out_from_the_middle():
    body = list(range(20))
    found = list(stretches([97, *body * 12, 98, 99]))
    assert [(s.period, s.layers) for s in found] == [(20, 12)]
    (short,) = left_out(found, 2, 3)
    assert short.gone == 7 and len(short.left_out) == 7 * 20
    assert left_out(found, 6, 6)[0].gone == left_out(found, 9, 9)[0].gone == 0
    assert FEWEST_LAYERS < 12


def test_the_whole_is_scheduled_few_times_and_as_well_as_by_a_search_on_it():
    whole = layered(20_000)
    scheduled = []
    list_schedule = search.list_schedule

    def counted(tasks, *how):
        scheduled.append(tasks.count)
        return list_schedule(tasks, *how)

    with mock.patch.object(search, "list_schedule", counted):
        found = solve.solve(whole)
    most = max(scheduled)
    assert sum(count == most for count in scheduled) <= 3 * (search.WAYS + search.SLIMMED)
    assert sum(count < most / 5 for count in scheduled) > 10
    judged = judge(whole, found.schedule)
    assert judged.makespan_us == pytest.approx(found.makespan_us) and found.within_cap
    with mock.patch.object(solve, "folded", lambda problem: None):
        searched = solve.solve(whole)
    assert found.makespan_us <= 1.01 * searched.makespan_us


def test_where_no_way_fits_the_whole_is_searched():
    whole = layered(20_000)
    with mock.patch.object(solve, "rehearse", lambda *how: []):
        found = solve.solve(whole)
    assert found.within_cap and found.gap < 0.2
