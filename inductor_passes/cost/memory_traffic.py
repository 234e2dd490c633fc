"""Bytes that each node moves through device memory, with Inductor's fusion taken into account.

Which values reach memory is Inductor's choice, made after our passes. The rule used here, which looks
at the graph's edges only and never at the order of its nodes:

- A node is *fusible* if it is pointwise (elementwise, factory, indexing) or a reduction. Its iteration
  size is the number of elements it computes, for a reduction the number it reads.
- Its *depth* is the largest number of nodes on any path to it that end a kernel: all that are not
  fusible (matrix products, launches, waits ...) and long reductions to few elements, which Inductor
  splits. Two fusible nodes joined by an edge share a kernel if their depths are equal, so nothing in
  between has to run first, and their iteration sizes fit: equal, or a small operand is broadcast. A
  value that is read in part is not fused.
- A use in such a shared kernel reads nothing, and a value with no other use is not written. All other
  values are written once, and read once by each kernel: readers of equal depth and size count as one
  kernel and share the read evenly.

Views are free, and a broadcast value is read once per distinct element. Embedding and gather read what
they pick, not the table. A node that writes memory starts a kernel.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import fx

from inductor_passes.cost.flops import op_name
from inductor_passes.graph.aliasing import is_view, mutated_inputs
from inductor_passes.graph.collectives import role
from inductor_passes.graph.node_kinds import NodeKind, distinct_bytes, loop_of, node_kinds, tensors

_OVERWRITING = frozenset(("copy_", "fill_", "zero_"))


class Traffic(NamedTuple):
    """Bytes one node reads and writes, and whether a kernel starts at it."""

    read_bytes: float
    write_bytes: float
    starts_kernel: bool


class Accesses(NamedTuple):
    """The traffic of one node, value by value.

    ``reads``: bytes read of each value, views resolved. ``writes``: bytes written of the node's value or of
    its parts, under the node that stands for them; under None, what it writes of its inputs.
    """

    reads: dict[fx.Node, float]
    writes: dict[fx.Node | None, float]
    starts_kernel: bool


def graph_traffic(graph: fx.Graph) -> dict[fx.Node, Traffic]:
    """Traffic of every node. Linear in nodes and edges; does not depend on the order of the nodes."""
    return {
        node: Traffic(
            sum(found.reads.values(), 0.0), sum(found.writes.values(), 0.0), found.starts_kernel
        )
        for node, found in graph_accesses(graph).items()
    }


def graph_accesses(graph: fx.Graph) -> dict[fx.Node, Accesses]:
    """The same, value by value."""
    kinds = node_kinds(graph)
    # How many readers of a value one kernel has: they share a read.
    sharers: Counter[tuple[fx.Node, int, int]] = Counter()
    reads: dict[fx.Node, dict[fx.Node, int]] = {}
    written: set[fx.Node] = set()
    used: set[fx.Node] = set()
    for node, kind in kinds.items():
        if kind.free and node.op != "output" and role(node) != "launch":
            continue
        reads[node] = found = _values_read(node, kinds)
        used.update(found)
        for value, size in found.items():
            if _fused(value, node, size, kinds):
                found[value] = 0
                continue
            written.add(value)
            if kind.fusible:
                sharers[value, kind.depth, kind.iterations] += 1
    result = {}
    for node, kind in kinds.items():
        if kind.free:
            result[node] = Accesses({}, {}, False)
            continue
        fusible = kind.fusible
        read: dict[fx.Node, float] = {}
        for value, size in reads[node].items():
            shared = sharers[value, kind.depth, kind.iterations] if fusible else 1
            read[value] = size / (shared or 1)
        write: dict[fx.Node | None, float] = {}
        for written_as, size in _values_written(node, kind):
            inside = fusible and written_as in used and written_as not in written
            write[written_as] = write.get(written_as, 0.0) + (0 if inside else size)
        result[node] = Accesses(read, write, any(write.values()) or not fusible)
    return result


def value_behind(node: fx.Node) -> fx.Node:
    """The value that a node is a view of; itself if it is none."""
    while is_view(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _fused(value: fx.Node, reader: fx.Node, size: int, kinds: dict[fx.Node, NodeKind]) -> bool:
    """Return whether ``reader`` gets ``value`` inside one kernel, without memory in between."""
    producer, consumer = kinds[value], kinds[reader]
    if not producer.fusible or producer.depth != consumer.depth or size < producer.bytes:
        return False
    loop = loop_of(reader.target)
    if loop == "cat":
        # Inductor computes a part of a concatenation in place, where nothing else needs it.
        return producer.pointwise and len(value.users) == 1
    if loop == "picking" or not consumer.fusible:
        return False
    if producer.reduction:
        return consumer.pointwise and consumer.iterations in (
            producer.elements,
            producer.iterations,
        )
    return producer.elements == consumer.iterations or (
        producer.elements < consumer.iterations
        and consumer.iterations % max(producer.elements, 1) == 0
    )


def _values_read(node: fx.Node, kinds: dict[fx.Node, NodeKind]) -> dict[fx.Node, int]:
    """Values that the node reads, views resolved, with the bytes read of each."""
    found: dict[fx.Node, int] = {}
    sources = node.all_input_nodes
    if op_name(node) in _OVERWRITING:
        sources = [source for source in sources if source not in mutated_inputs(node)]
    picks = loop_of(node.target) == "picking"
    for position, source in enumerate(sources):
        size = kinds[source].bytes
        if picks and position == 0:
            size = min(size, kinds[node].bytes)
        value = value_behind(source)
        if value is not source or value in found:
            # Two views of one value together read no more than the value.
            size = min(found.get(value, 0) + size, kinds[value].bytes)
        found[value] = size
    return found


def _values_written(node: fx.Node, kind: NodeKind) -> Iterator[tuple[fx.Node | None, int]]:
    """Bytes written, each with the node whose users read them; None for an overwritten input."""
    mutated = mutated_inputs(node)
    if mutated:
        for target in mutated:
            yield None, sum(distinct_bytes(t) for t in tensors(target.meta.get("val")))
        return
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield node, kind.bytes
        return
    parts = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    for index, item in enumerate(value if isinstance(value, (list, tuple)) else ()):
        if isinstance(item, torch.Tensor):
            yield parts.get(index, node), distinct_bytes(item)
