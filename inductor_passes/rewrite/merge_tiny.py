"""Collectives that are all start and no bytes share one start."""

from __future__ import annotations

import abc
import math
import operator
from collections.abc import Sequence

import torch
from torch import fx

from inductor_passes.graph.collectives import (
    MEMBERS,
    group_size,
    launches,
    numbers_of,
    output_bytes,
    payload_bytes,
    waits_of,
)
from inductor_passes.graph.dependencies import relink, sorted_behind
from inductor_passes.graph.edit import (
    CAST,
    PLACING,
    aten,
    chain_above,
    emit,
    replace,
    static_shape,
    tensor,
)
from inductor_passes.graph.phases import phase_of
from inductor_passes.graph_pass import Numerics, PassStats, Rewrite

c10d = torch.ops._c10d_functional
CONTIGUOUS = {"memory_format": torch.contiguous_format}
# What stands between an input of the graph and its gather.
FROM_INPUT = PLACING | {CAST, aten.constant_pad_nd.default}
HELD = 4  # times tiny_bytes: what one launch may gather
_MERGED = (
    c10d.all_reduce.default,
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
)


class Merging(Rewrite):
    """Rewrites that make one launch of several; which, each says for itself.

    Stats: ``launches_before``, ``launches_after`` (of those merged).
    """

    replaced_by_plan = True
    shows_in_plan = True
    # A launch that reads a merged result moves behind it; every rank does the same.
    keeps_launch_order = False

    def run(self, graph: fx.Graph) -> PassStats:
        found = [bucket for bucket in self.buckets(graph) if len(bucket) > 1]
        for bucket in found:
            merge(graph, bucket, self.name)
        if found:
            _sort(graph)
        counters = {"launches_before": sum(map(len, found)), "launches_after": len(found)}
        return PassStats(bool(found), counters)

    @abc.abstractmethod
    def buckets(self, graph: fx.Graph) -> list[list[fx.Node]]:
        """Launches that may become one, together; those that stay alone may be left out."""


class MergeTiny(Merging):
    """Merge collectives of at most 16 KiB on one group that do not need each other.

    ``tiny_bytes`` is that limit. What a launch gathers may be four times as much. Payloads are
    flattened and put side by side: a dozen norms and losses cost one start instead of twelve. A
    merged launch stands where the last of its parts stood.

    Requires: a functional graph; static shapes.
    Ensures:  the same values; a sum may be added in another order, because a ring cuts the payload
              elsewhere; a second run changes nothing.
    Stats:    ``launches_before``, ``launches_after`` (of those merged).
    """

    name = "merge_tiny"
    numerics = Numerics.REASSOCIATING

    def __init__(self, tiny_bytes: int = 16 << 10, most: int = 256) -> None:
        self.tiny_bytes = tiny_bytes
        self.most = most

    def digest(self) -> str:
        return f"{self.tiny_bytes} {self.most}"

    def buckets(self, graph: fx.Graph) -> list[list[fx.Node]]:
        """Tiny launches that may become one: same op, group and type, and none needs another."""
        tiny = [launch for launch in launches(graph) if self._is_tiny(launch)]
        if len(tiny) < 2:
            return []
        needs = _launches_needed(graph, tiny)
        open_buckets: dict[object, list[fx.Node]] = {}
        bucket_of: dict[fx.Node, list[fx.Node]] = {}
        found: list[list[fx.Node]] = []
        for launch in tiny:
            value = tensor(launch.args[0])
            assert value is not None
            # Reduce operation, group and sizes are the arguments after the first.
            # What a backward gathers again is not kept for it.
            phase = phase_of([launch])
            key = (launch.target, str(launch.args[1:]), value.dtype, value.device, phase)
            bucket = open_buckets.get(key)
            full = bucket is not None and len(bucket) >= self.most
            # Merged launches must not need each other, also not through another bucket: that would
            # be a cycle.
            if bucket is None or full or _needs_any(launch, bucket, needs, bucket_of):
                bucket = open_buckets[key] = []
                found.append(bucket)
            bucket.append(launch)
            bucket_of[launch] = bucket
        return found

    def _is_tiny(self, launch: fx.Node) -> bool:
        if launch.target not in _MERGED or len(waits_of(launch)) != 1:
            return False
        if static_shape(launch.args[0]) is None:
            return False
        # What is gathered stays in memory until the last of the bucket has been read.
        held = output_bytes(launch)
        return 0 < payload_bytes(launch) <= self.tiny_bytes and held <= HELD * self.tiny_bytes


def merge(graph: fx.Graph, bucket: Sequence[fx.Node], name: str) -> None:
    """Replace the launches of ``bucket`` by one on their flattened payloads, placed at the last
    of them; at the first, if the graph's inputs alone are gathered.

    What reads an early member may stand before the merged launch then.
    """
    last = bucket[-1]
    gathers = last.target is c10d.all_gather_into_tensor.default
    scatters = last.target is c10d.reduce_scatter_tensor.default
    ranks = group_size(last) if gathers or scatters else 1
    shapes = [static_shape(launch.args[0]) or () for launch in bucket]
    sizes = [math.prod(shape) for shape in shapes]
    # What each rank gets of a payload to be scattered stands in a row of its own.
    rows = [ranks, -1] if scatters else [-1]
    with graph.inserting_before(last):
        flat = [
            emit(graph, aten.reshape.default, (launch.args[0], rows), launch) for launch in bucket
        ]
        payload = emit(graph, aten.cat.default, (flat, 1) if scatters else (flat,), last)
        if scatters:
            payload = emit(graph, aten.reshape.default, (payload, [-1]), last)
        launched = emit(graph, last.target, (payload, *last.args[1:]), last)
        launched.meta[MEMBERS] = numbers_of(bucket)
        arrived = emit(graph, c10d.wait_tensor.default, (launched,), last)
        if gathers:
            arrived = emit(graph, aten.view.default, (arrived, [ranks, sum(sizes)]), last)
        parts = [size // ranks for size in sizes] if scatters else sizes
        split = aten.split_with_sizes.default
        pieces = emit(graph, split, (arrived, parts, 1 if gathers else 0), last)
        results = []
        for i, launch in enumerate(bucket):
            piece = emit(graph, operator.getitem, (pieces, i), launch)
            shape = list(shapes[i])
            if gathers:
                # A copy of rows as they lie, which a reader can vectorize. Reshaped in one step,
                # each element would divide its index by a row's length.
                piece = emit(graph, aten.view.default, (piece, [ranks, *shape]), launch)
                piece = emit(graph, aten.clone.default, (piece,), launch, CONTIGUOUS)
                shape[0] *= ranks
            elif scatters:
                shape[0] //= ranks
            result = emit(graph, aten.reshape.default, (piece, shape), launch)
            wait = waits_of(launch)[0]
            replace(wait, result, name)
            results.append(result)
    if gathers:
        relink(graph, _from_first_on(graph, bucket, results))
    for launch in bucket:
        graph.erase_node(waits_of(launch)[0])
        graph.erase_node(launch)


def _sort(graph: fx.Graph) -> None:
    """Put every node behind what it reads.

    Of all nodes that may come next, the one that stood first does: the least change, and the same
    on all ranks.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    behind = {i: [position[n] for n in node.all_input_nodes] for i, node in enumerate(nodes)}
    relink(graph, [nodes[i] for i in sorted_behind(behind)])


def _from_first_on(
    graph: fx.Graph, bucket: Sequence[fx.Node], results: Sequence[fx.Node]
) -> list[fx.Node]:
    """Return the nodes in order, where what leads from the graph's inputs to ``results`` comes
    before the first launch of ``bucket``.

    Behind the last, all that reads what an earlier one has gathered would have to wait: a layer's
    product for the gathers of all layers.
    """
    nodes = list(graph.nodes)
    chains = [chain_above(launch.args[0], FROM_INPUT) for launch in bucket]
    if any(chain[-1].op != "placeholder" for chain in chains):
        return nodes
    needed = set(results)
    above = list(results)
    for node in above:
        more = [each for each in node.all_input_nodes if each not in needed]
        needed.update(more)
        above += more
    first = nodes.index(bucket[0])
    return [
        *nodes[:first],
        *(node for node in nodes[first:] if node in needed),
        *(node for node in nodes[first:] if node not in needed),
    ]


def _launches_needed(graph: fx.Graph, tiny: Sequence[fx.Node]) -> dict[fx.Node, frozenset[fx.Node]]:
    """For every launch in ``tiny`` those among them that it needs, directly or not."""
    some = set(tiny)
    above: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        needed: frozenset[fx.Node] = frozenset()
        for source in node.all_input_nodes:
            # Most nodes have the same launches above them as an input of theirs: the set is shared,
            # not copied.
            more = above[source] | {source} if source in some else above[source]
            needed = more if not needed or needed <= more else needed | more
        above[node] = needed
    return {launch: above[launch] for launch in tiny}


def _needs_any(
    launch: fx.Node,
    bucket: Sequence[fx.Node],
    needs: dict[fx.Node, frozenset[fx.Node]],
    bucket_of: dict[fx.Node, list[fx.Node]],
) -> bool:
    """Return whether ``launch`` needs one of ``bucket``, given that a merged launch needs what
    its parts need.
    """
    pending, seen = list(needs[launch]), set(needs[launch])
    while pending:
        # Reaching one member of a bucket reaches all: after merging they are one node.
        for member in bucket_of[pending.pop()]:
            for needed in (member, *needs[member]):
                if needed not in seen:
                    seen.add(needed)
                    pending.append(needed)
    return not seen.isdisjoint(bucket)
