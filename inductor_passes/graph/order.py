"""Put the nodes of a graph in a given order."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx


def relink(graph: fx.Graph, order: Sequence[fx.Node]) -> bool:
    """Make ``order``, a permutation of the nodes, the graph's order. Returns whether it changed."""
    if all(a is b for a, b in zip(graph.nodes, order, strict=True)):
        return False
    last = order[0]
    for node in order[1:]:
        if last.next is not node:
            last.append(node)
        last = node
    return True
