"""Peak memory of a graph: which node owns which memory, and how long launches read it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from inductor_passes.graph.aliasing import alias_source
from inductor_passes.graph.collectives import role
from inductor_passes.graph.node_kinds import element_count, tensors
from inductor_passes.simulate.peak import live_bytes


def memory_owners(graph: fx.Graph) -> list[int]:
    """Position of the node whose memory each node's value is: its own, or that of a view's base."""
    position: dict[fx.Node, int] = {}
    owners: list[int] = []
    for i, node in enumerate(graph.nodes):
        position[node] = i
        source = alias_source(node)
        owners.append(i if source is None else owners[position[source]])
    return owners


def graph_live_bytes(
    graph: fx.Graph, owners: Sequence[int], awaits: Sequence[Sequence[int]]
) -> list[int]:
    """Bytes of a graph's own values while each node runs, in full even where Inductor fuses them away.

    Graph inputs and constants are not counted; outputs live to the end. Views and in-place results are
    their base's memory. A launch reads its input until its wait, or to the end if nothing waits.
    ``awaits[i]``: launches that node i waits for, as positions in the graph.
    """
    owner_of: dict[fx.Node, int] = {}
    fresh: list[int] = []
    last = list(range(len(owners)))
    read_by: dict[int, list[int]] = {}  # what a launch still reads until something waits for it
    unwaited: set[int] = set()
    for i, node in enumerate(graph.nodes):
        owner_of[node] = owners[i]
        fresh.append(value_bytes(node) if owners[i] == i else 0)
        inputs = [owner_of[used] for used in node.all_input_nodes]
        for owner in inputs:
            last[owner] = i
        if role(node) == "launch":
            read_by[i] = inputs
            unwaited.add(i)
        for launch in awaits[i]:
            unwaited.discard(launch)
            for owner in read_by.get(launch, ()):
                last[owner] = i
    for launch in unwaited:
        for owner in read_by[launch]:
            last[owner] = len(last) - 1
    return live_bytes(fresh, last)


def value_bytes(node: fx.Node) -> int:
    """Bytes of the tensors that a call makes; 0 for inputs and constants."""
    if node.op != "call_function":
        return 0
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return element_count(value) * value.dtype.itemsize
    return sum(element_count(tensor) * tensor.dtype.itemsize for tensor in tensors(value))
