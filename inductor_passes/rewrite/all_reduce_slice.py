"""A sum of which each rank keeps its own part is a reduce_scatter."""

from __future__ import annotations

import torch
from torch import fx

from inductor_passes.base import Numerics, PassStats
from inductor_passes.graph.collectives import (
    group_name,
    group_size,
    launches,
    payload_bytes,
    reduce_op,
    waits_of,
)
from inductor_passes.graph.edit import emit, replace
from inductor_passes.rewrite.base import Rewrite
from inductor_passes.rewrite.layout import cut_first
from inductor_passes.rewrite.own_chunk import erase_chunks, own_chunks

c10d = torch.ops._c10d_functional


class AllReduceSlice(Rewrite):
    """all_reduce, then this rank's own chunk -> reduce_scatter: half the bytes on the link.

    Partial to Replicate to Shard, as two redistributes. What counts as own is in ``own_chunk.py``.

    Requires: a functional graph; static shapes that the group divides.
    Ensures:  the same sums, perhaps in another order; a second run changes nothing.
    Stats:    ``all_reduces_replaced``, ``bytes_saved`` (on the link, of a ring, by this rank).
    """

    name = "all_reduce_slice"
    numerics = Numerics.REASSOCIATING

    def run(self, graph: fx.Graph) -> PassStats:
        count = saved = 0
        for launch in launches(graph):
            waits = waits_of(launch)
            if launch.target is not c10d.all_reduce.default or len(waits) != 1:
                continue
            chunks = own_chunks(waits[0], launch)
            if chunks is None or len({chunk.dim for chunk in chunks}) != 1:
                continue
            dim, ranks = chunks[0].dim, group_size(launch)
            saved += payload_bytes(launch) * (ranks - 1) // ranks
            operation, group = reduce_op(launch), group_name(launch)
            with graph.inserting_before(launch):
                source = cut_first(graph, launch.args[0], dim, ranks, launch)  # type: ignore[arg-type]
                args = (source, operation, ranks, launch.args[2])
                scattered = emit(graph, c10d.reduce_scatter_tensor.default, args, launch)
            assert group == group_name(scattered)
            with graph.inserting_before(waits[0]):
                arrived = emit(graph, c10d.wait_tensor.default, (scattered,), waits[0])
            for chunk in chunks:
                replace(chunk.node, arrived, self.name)
            erase_chunks(graph, chunks)
            graph.erase_node(waits[0])
            graph.erase_node(launch)
            count += 1
        return PassStats(count > 0, {"all_reduces_replaced": count, "bytes_saved": saved})
