"""The forward and the backward of a joint graph: no compute of the one hides a launch of the other.

AOTAutograd makes two graphs of a joint one, and the tangents enter between them. Here what the forward's results
need is the forward, and all else the backward, as what is saved is chosen later.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

from torch import fx

from inductor_passes.torch_compat import aot

FORWARD, BACKWARD = "forward", "backward"


def backward_of(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the operators of a joint graph's backward; of another graph none."""
    late = set(aot.tangents(graph))
    if not late:
        return frozenset()
    for node in graph.nodes:
        if any(source in late for source in node.all_input_nodes):
            late.add(node)
    early = {node for node in graph.output_node().all_input_nodes if node not in late}
    for node in reversed(graph.nodes):
        if node in early:
            early.update(node.all_input_nodes)
    for node in graph.nodes:
        if node.target is operator.getitem and node.args[0] in early:
            early.add(node)
    calls = (node for node in graph.nodes if node.op not in ("placeholder", "output"))
    return frozenset(node for node in calls if node not in early)


def halves(graph: fx.Graph) -> tuple[fx.Graph, ...]:
    """Return copies of a joint graph's forward and backward, each for being priced; of another graph itself.

    What the backward reads of the forward is a result there and an input here. Names stay.
    """
    late = backward_of(graph)
    if not late:
        return (graph,)
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    results = graph.output_node().all_input_nodes
    inner = [node for node in calls if node not in late]
    read = dict.fromkeys(used for node in calls if node in late for used in node.all_input_nodes)
    saved = [node for node in read if node not in late and node.op != "placeholder"]
    first = _part(graph, inner, (), [n for n in results if n not in late] + saved)
    behind = [node for node in calls if node in late]
    return first, _part(graph, behind, saved, [node for node in results if node in late])


def _part(
    graph: fx.Graph,
    nodes: Iterable[fx.Node],
    given: Iterable[fx.Node],
    results: Iterable[fx.Node],
) -> fx.Graph:
    nodes, results = list(nodes), list(dict.fromkeys(results))
    read = {used for node in nodes for used in node.all_input_nodes} | set(results)
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node in read:
            copies[node] = made.node_copy(node)
    for node in given:
        copies[node] = made.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = made.node_copy(node, lambda used: copies[used])
    made.output(tuple(copies[node] for node in results))
    return made
