"""Two changes of placement in a row are one, or none."""

from __future__ import annotations

import torch
from torch import fx

from inductor_passes.graph.collectives import (
    argument,
    group_size,
    launches,
    payload_bytes,
    waits_of,
)
from inductor_passes.graph.edit import aten, emit, replace
from inductor_passes.graph_pass import PassStats, Rewrite
from inductor_passes.rewrite.all_reduce_slice import OwnChunk, erase_chunks, own_chunks
from inductor_passes.rewrite.inner_dimensions import (
    CONTIGUOUS,
    Gathered,
    cut_first,
    gathered,
    join_at,
)

c10d = torch.ops._c10d_functional


class ComposeRedistributes(Rewrite):
    """Replace a gather whose reader takes only this rank's chunk: by nothing, or an all_to_all.

    Cut along the gathered dimension, the chunk is what this rank sent; cut along another one, an
    all_to_all brings it with 1 / ranks of the bytes. An all_to_all of dimensions followed by
    another is one, or none if the second undoes the first.

    Requires: a functional graph; static shapes that the group divides.
    Ensures:  every bit as before; a second run changes nothing.
    Stats:    ``gathers_removed``, ``gathers_to_all_to_all``, ``all_to_alls_composed``,
              ``bytes_saved`` (on the link, by this rank).
    """

    name = "compose_redistributes"

    def run(self, graph: fx.Graph) -> PassStats:
        counters = dict.fromkeys(
            ("gathers_removed", "gathers_to_all_to_all", "all_to_alls_composed", "bytes_saved"), 0
        )
        for node in list(graph.nodes):
            if _is_dim_all_to_all(node):
                self._compose(graph, node, counters)
        for launch in launches(graph):
            if launch.target is c10d.all_gather_into_tensor.default:
                self._cut(graph, launch, counters)
        changed = any(counters.values())
        return PassStats(changed, counters)

    def _cut(self, graph: fx.Graph, launch: fx.Node, counters: dict[str, int]) -> None:
        waits, ranks = waits_of(launch), group_size(launch)
        if len(waits) != 1:
            return
        whole = gathered(waits[0], ranks)
        chunks = own_chunks(whole.node, launch)
        if chunks is None:
            return
        dims = {chunk.dim for chunk in chunks}
        shard = launch.args[0]
        assert isinstance(shard, fx.Node)
        payload = payload_bytes(launch)
        # Gathered and cut along one dimension by one group: every rank has its own chunk already.
        if dims == {whole.dim}:
            with graph.inserting_before(chunks[0].node):
                # A copy, because the chunk was memory of its own: a reader may write to it, or want
                # it contiguous.
                own = emit(graph, aten.clone.default, (shard,), launch, CONTIGUOUS)
            counters["gathers_removed"] += 1
            counters["bytes_saved"] += payload * (ranks - 1)
        elif len(dims) == 1:
            own = _all_to_all(graph, launch, shard, whole, chunks[0], ranks)
            counters["gathers_to_all_to_all"] += 1
            counters["bytes_saved"] += payload * (ranks - 1) * (ranks - 1) // ranks
        else:
            return
        for chunk in chunks:
            replace(chunk.node, own, self.name)
        erase_chunks(graph, chunks)
        graph.erase_node(waits[0])
        graph.erase_node(launch)

    def _compose(self, graph: fx.Graph, second: fx.Node, counters: dict[str, int]) -> None:
        first = second.args[0]
        if not isinstance(first, fx.Node) or not _is_dim_all_to_all(first) or len(first.users) != 1:
            return
        source, gather, shard, group = first.args
        _, gather_2, shard_2, group_2 = second.args
        # Only where the second takes apart the dimension that the first put together, on one group.
        if gather_2 != shard or group != group_2 or not isinstance(source, fx.Node):
            return
        counters["bytes_saved"] += payload_bytes(first)
        with graph.inserting_before(second):
            if shard_2 == gather:
                result = emit(graph, aten.clone.default, (source,), second, CONTIGUOUS)
            else:
                result = emit(graph, second.target, (source, gather, shard_2, group), second)
        replace(second, result, self.name)
        graph.erase_node(second)
        graph.erase_node(first)
        counters["all_to_alls_composed"] += 1


def _all_to_all(
    graph: fx.Graph,
    launch: fx.Node,
    shard: fx.Node,
    whole: Gathered,
    chunk: OwnChunk,
    ranks: int,
) -> fx.Node:
    """Insert an all_to_all that brings what ``chunk`` holds from the shards of all ranks."""
    with graph.inserting_before(launch):
        sent = cut_first(graph, shard, chunk.dim, ranks, launch)
        each = [sent.meta["val"].shape[0] // ranks] * ranks
        args = (sent, each, each, argument(launch, "group_name"))
        moved = emit(graph, c10d.all_to_all_single.default, args, launch)
    with graph.inserting_before(chunk.node):
        arrived = emit(graph, c10d.wait_tensor.default, (moved,), launch)
        return join_at(graph, arrived, whole.dim, ranks, launch)


def _is_dim_all_to_all(node: fx.Node) -> bool:
    return node.op == "call_function" and "shard_dim_alltoall" in str(node.target)
