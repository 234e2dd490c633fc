"""A copy of a graph that is edited: dropped it leaves nothing, committed it is the graph."""

import torch
from torch import fx

from inductor_passes.graph.edit import TrialCopy


def module():
    def program(x):
        return torch.cos(torch.sin(x))

    return fx.symbolic_trace(program)


def add_constant(graph):
    """Add a constant of the graph's module to what is returned."""
    graph.owning_module.register_buffer("offset", torch.ones(()))
    output = graph.output_node()
    with graph.inserting_before(output):
        offset = graph.get_attr("offset")
        output.args = (graph.call_function(torch.add, (output.args[0], offset)),)


def test_a_dropped_trial_leaves_graph_and_module_as_they_were():
    gm = module()
    before = str(gm.graph)
    add_constant(TrialCopy(gm.graph, in_module=True).graph)
    assert str(gm.graph) == before and not hasattr(gm, "offset")


def test_a_committed_trial_brings_names_constants_and_marks():
    gm = module()
    trial = TrialCopy(gm.graph, in_module=True)
    add_constant(trial.graph)
    trial.graph.output_node().meta["mark"] = 1
    trial.commit()
    gm.recompile()
    x = torch.rand(3)
    assert torch.equal(gm(x), torch.cos(torch.sin(x)) + 1)
    assert [n.name for n in gm.graph.nodes] == [n.name for n in trial.graph.nodes]
    assert gm.graph.output_node().meta["mark"] == 1


def test_twins_are_the_copies_of_nodes():
    graph = module().graph
    twins = TrialCopy(graph).twins()
    assert all(twin is not node and twin.name == node.name for node, twin in twins.items())
