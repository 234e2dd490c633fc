"""States that wait on the host."""

import torch
from torch import fx

from inductor_passes.cost import TopologyCostModel, load_topology
from inductor_passes.graph.collectives import HOST_NAMESPACE
from inductor_passes.memory.host_copies import State, move_states
from inductor_passes.schedule.extract import extract
from inductor_passes.schedule.solver.solve import solve
from inductor_passes.simulate import simulate

ops = getattr(torch.ops, HOST_NAMESPACE)


def test_states_move_behind_the_last_input():
    # Passes put nodes just behind what they read, before further inputs.
    graph = fx.Graph()
    value = torch.empty(1024)
    x = graph.placeholder("x")
    early = graph.call_function(torch.ops.aten.neg.default, (x,))
    state = graph.placeholder("state")
    update = graph.call_function(torch.ops.aten.mul.Tensor, (state, early))
    graph.output(update)
    for node in (x, early, state, update):
        node.meta["val"] = value
    cost = TopologyCostModel(load_topology("h100x8"))
    move_states(graph, [State(state, (update,))], cost)
    graph.lint()
    names = [
        node.target.__name__.partition(".")[0] for node in graph.nodes if callable(node.target)
    ]
    assert names.index("neg") < names.index("offload") < names.index("restore") < names.index("mul")


def test_a_state_comes_back_no_earlier_than_its_update_asks_for():
    graph = fx.Graph()
    value = torch.empty(2048, 2048)
    x, state = (graph.placeholder(name) for name in ("x", "state"))
    products = [x]
    for _ in range(40):
        products.append(graph.call_function(torch.ops.aten.mm.default, (products[-1], x)))
    update = graph.call_function(torch.ops.aten.mul.Tensor, (state, products[-1]))
    graph.output(update)
    for node in (x, state, *products, update):
        node.meta["val"] = value
    cost = TopologyCostModel(load_topology("h100x8"))
    compute_us = simulate(graph, cost).compute_us
    move_states(graph, [State(state, (update,))], cost)
    extracted = extract(graph, cost)
    solution = solve(extracted.problem)
    place = {node: i for i, node in enumerate(extracted.order(solution.order))}
    (out,), (back,) = (
        graph.find_nodes(op="call_function", target=getattr(ops, name).default)
        for name in ("offload", "reload")
    )
    assert place[out] < place[products[1]]
    assert place[products[20]] < place[back] < place[products[-1]]
    assert solution.makespan_us < 1.01 * compute_us
