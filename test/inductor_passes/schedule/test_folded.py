"""Equal layers once: what is left of a problem, and that a search on it is a hint for the whole."""

import dataclasses
from unittest import mock

import pytest

from inductor_passes.schedule.solver import search, solve
from inductor_passes.schedule.solver.evaluate import evaluate
from inductor_passes.schedule.solver.problem import MIB, Node, Problem, check_problem
from inductor_passes.schedule.solver.repeated_layers import (
    FEWEST_LAYERS,
    FEWEST_NODES,
    folded,
    left_out,
    stretches,
)

LAYER = 40  # nodes
LINK = ((1.0, 90.0), (2.0, 115.0), (16.0, 400.0), (64.0, 1330.0), (256.0, 5000.0))


def layered(count):
    """About ``count`` nodes: backward layers of 40, with gathered weights, products, gradients
    scattered, a second group.
    """
    layers = max(1, count // 40)
    nodes = [Node(f"shard_{i}", "input") for i in range(layers * 4)]
    nodes.append(Node("gradient", "input"))
    gradient = len(nodes) - 1
    outputs = []

    def add(node):
        nodes.append(node)
        return len(nodes) - 1

    def collective(op, group, source, payload, size):
        reduce = "sum" if op == "reduce_scatter" else None
        launch = add(
            Node(op, "launch", (source,), 0.0, size, None, group, op, "bf16", reduce, payload)
        )
        return add(Node("wait", "wait", (launch,), alias=launch, launch=launch))

    for layer in range(layers):
        for w in range(4):
            shard = layer * 4 + w
            cast = add(Node("cast", "compute", (shard,), 2.0, MIB // 2))
            weight = collective("all_gather", "dp", cast, MIB // 2, 32 * MIB)
            view = add(Node("view", "compute", (weight,), alias=weight))
            kept = add(Node("recomputed", "compute", (shard,), 20.0, 16 * MIB))
            partial = add(Node("mm_data", "compute", (gradient, view), 150.0, 16 * MIB))
            grad = add(Node("mm_weight", "compute", (gradient, kept), 150.0, 32 * MIB))
            outputs.append(collective("reduce_scatter", "dp", grad, 32 * MIB, 4 * MIB))
            gradient = partial
        gradient = collective("reduce_scatter", "tp", gradient, 16 * MIB, 16 * MIB)
        gradient = add(Node("norm", "compute", (gradient,), 10.0, 16 * MIB))
    add(Node("output", "output", (*outputs, gradient)))
    links = {group: {"all_gather": LINK, "reduce_scatter": LINK} for group in ("dp", "tp")}
    return Problem(f"{len(nodes)} nodes", tuple(nodes), links, 2.8e6, {"dp": 8, "tp": 8})


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


def test_each_node_keeps_its_cost_and_reads_as_its_equal():
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


def test_view_input_stays_and_names_no_freed_tensor():
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


def test_few_evaluations_schedule_as_well_as_a_whole_search():
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
    evaluated = evaluate(whole, found.schedule)
    assert evaluated.makespan_us == pytest.approx(found.makespan_us) and found.within_cap
    with mock.patch.object(solve, "folded", lambda problem: None):
        searched = solve.solve(whole)
    assert found.makespan_us <= 1.01 * searched.makespan_us


def test_where_no_way_fits_the_whole_is_searched():
    whole = layered(20_000)
    with mock.patch.object(solve, "search_folded", lambda *how: []):
        found = solve.solve(whole)
    assert found.within_cap and found.gap < 0.2
