"""Equal layers once: a graph with a few of its many equal layers, in which a choice shows in a fraction of the time.

Layers are found in the order of the graph: a stretch in which each node looks like the one a *period* further on.
A joint graph has two of them, of the forward and of the backward, which meet layer by layer from opposite ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from inductor_passes.schedule.solver.repeated_layers import WINDOW, left_out, stretches

FIRST, LAST = 1, 2  # layers that are kept at either end of a stretch


@dataclass(frozen=True, slots=True)
class Folded:
    """A graph in which ``kept`` of ``layers`` equal layers are left, and the node of the whole graph that each node is."""

    graph: fx.Graph
    whole: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    layers: int = 1
    kept: int = 1


def fold(graph: fx.Graph) -> Folded:
    """Return a copy without the middle layers; the graph itself where it has few.

    What is kept and reads a layer that is gone reads its like in another, so that shapes agree and every node
    costs what it did. The copy computes something else: it is for being priced.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    found = left_out(list(stretches(looks(nodes))), FIRST, LAST)
    if not found:
        return Folded(graph)
    place = {node: i for i, node in enumerate(nodes)}
    of = {at: stretch for stretch in found for at in stretch.left_out}

    def reads(node: fx.Node, source: fx.Node) -> fx.Node:
        at = place.get(source, -1)
        return nodes[of[at].stand_in(at, place[node])] if at in of else source

    kept = [node for at, node in enumerate(nodes) if at not in of]
    inputs = {node: {used: reads(node, used) for used in node.all_input_nodes} for node in kept}
    read = {source for sources in inputs.values() for source in sources.values()}
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node in read:
            copies[node] = made.node_copy(node)
    for node in kept:
        copies[node] = made.node_copy(node, lambda used, by=inputs[node]: copies[by[used]])  # type: ignore[misc]
    output = graph.output_node()
    made.output(tuple(copies[node] for node in output.all_input_nodes if node in copies))
    most = max(found, key=lambda stretch: stretch.layers)
    whole = {copy: node for node, copy in copies.items()}
    return Folded(made, whole, most.layers, most.layers - most.gone)


def looks(nodes: Sequence[fx.Node]) -> list[int]:
    """Return a number for each node: equal where nodes do the same on the same shapes, with the same close by."""
    numbers: dict[str, int] = {}
    place = {node: i for i, node in enumerate(nodes)}
    found = []
    for i, node in enumerate(nodes):
        near = [i - place.get(used, -1) for used in node.all_input_nodes]
        args = fx.node.map_arg((node.args, node.kwargs), lambda used: None)
        target = node.target if node.op == "call_function" else node.op
        said = f"{target} {args} {_said(node.meta.get('val'))} {[d for d in near if d <= WINDOW]}"
        found.append(numbers.setdefault(said, len(numbers)))
    return found


def _said(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_said, value))
    return (
        f"{value.dtype} {list(value.shape)} {value.stride()}"
        if isinstance(value, torch.Tensor)
        else ""
    )
