"""States that wait on the host."""

import torch
from torch import fx

from inductor_passes.cost import TopologyCostModel, load_topology
from inductor_passes.memory.host_copies import State, move_states


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
