"""A graph's own nodes are priced as measured; the table of another graph counts as none."""

import dataclasses
import logging

import pytest
import torch
import torch.distributed._functional_collectives as funcol

from inductor_passes.graph.identity import digest_of_graph, operator_of
from inductor_passes.machine.times.times import GraphTimes, NodeTime, Times
from inductor_passes.pass_options import PassOptions
from inductor_passes.pipeline import cost_model, run_passes
from inductor_passes.testing import trace

SLOW_US = 5e4


def step(x, w, v):
    first = funcol.all_gather_tensor(w, 0, "0")
    second = funcol.all_gather_tensor(v, 0, "0")
    return torch.relu(torch.relu(x @ x) @ first) @ second


@pytest.fixture
def graph():
    return trace(step, [64, 64], [8, 64], [8, 64])


def table(graph, us, name=None):
    nodes = {
        node.name: NodeTime(operator_of(node), us, 1.0) for node in graph.nodes if "mm" in node.name
    }
    found = GraphTimes("forward", nodes, {})
    machine = cost_model(graph, PassOptions()).machine_name
    return Times(machine, "t", 8, 20, {name or digest_of_graph(graph): found})


def test_nodes_take_what_they_took(graph):
    cost = cost_model(graph, PassOptions(), table(graph, SLOW_US))
    by_name = {node.name: cost.compute_us(node) for node in graph.nodes}
    assert by_name["mm"] == by_name["mm_1"] == SLOW_US
    assert by_name["relu"] != SLOW_US
    assert cost.untimed.compute_us(next(n for n in graph.nodes if n.name == "mm")) < SLOW_US


def test_a_part_of_a_node_that_bears_its_name_is_not_the_node(graph):
    cost = cost_model(graph, PassOptions(), table(graph, SLOW_US))
    half = trace(torch.mm, [32, 64], [64, 64])
    (part,) = (node for node in half.nodes if node.name == "mm")
    assert cost.compute_us(part) != SLOW_US


def test_the_schedule_is_another_one_for_other_times(graph):
    record = run_passes(graph, cost=cost_model(graph, PassOptions(), table(graph, SLOW_US)))
    assert record.after.compute_us > 3 * SLOW_US - 1
    assert {n.name for n in record.nodes if n.event == "kernel"} == {"mm", "mm_1", "mm_2"}
    assert all(n.predicted_us < SLOW_US for n in record.nodes)


@pytest.mark.parametrize("spoil", ["name", "operator", "node"])
def test_times_of_another_graph_count_as_none(graph, caplog, spoil):
    caplog.set_level(logging.INFO)
    times = table(graph, SLOW_US, "another" if spoil == "name" else None)
    (timed,) = times.graphs.values()
    if spoil == "operator":
        timed.nodes["mm"] = NodeTime("aten.bmm.default", SLOW_US, 1.0)
    if spoil == "node":
        timed.nodes["mm_9"] = NodeTime("aten.mm.default", SLOW_US, 1.0)
    cost = cost_model(graph, PassOptions(), times)
    assert max(cost.compute_us(node) for node in graph.nodes) < SLOW_US
    assert cost.digest() == cost_model(graph, PassOptions()).digest()
    (line,) = [m for m in caplog.messages if "not used" in m]
    assert "other graphs" in line


def test_times_of_another_machine_count_as_none(graph, caplog):
    times = dataclasses.replace(table(graph, SLOW_US), machine="another")
    cost = cost_model(graph, PassOptions(), times)
    assert max(cost.compute_us(node) for node in graph.nodes) < SLOW_US
    (line,) = [m for m in caplog.messages if "not used" in m]
    assert "of other machines (another, and this is cpu-gloo" in line


def test_two_tables_are_two_keys(graph):
    digests = {
        cost_model(graph, PassOptions(), table(graph, us)).digest() for us in (1.0, 2.0, 2.0)
    }
    assert len(digests) == 2
