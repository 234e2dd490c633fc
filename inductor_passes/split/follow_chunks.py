"""Compute collective products in chunks as a plan says that was made for another rank's graph."""

from __future__ import annotations

from torch import fx

from inductor_passes.base import PassStats
from inductor_passes.errors import CannotFollowError
from inductor_passes.graph.numbers import CHUNKS, MEMBERS
from inductor_passes.split.base import Following
from inductor_passes.split.products import collective_products
from inductor_passes.split.region import Region


class FollowChunks(Following):
    """Chunk the collective products whose launches a plan chunks, in as many chunks, which lie alike.

    Requires: launches that bear the numbers of the program's (``agree/graph.py``), and what ``ChunkProducts`` requires.
    Ensures:  what ``ChunkProducts`` ensures.
    Stats:    ``launches`` (that were cut).
    Raises CannotFollowError if a launch is of no collective product of the graph that has such chunks.
    """

    name = "follow_chunks"

    def follow(self, graph: fx.Graph) -> PassStats:
        for number, (parts, along) in self.plan.chunks.items():
            region = _region(graph, number, parts, along)
            if region is None:
                raise CannotFollowError(
                    f"The graph has no collective product with launch {number} in {parts} chunks along {along}."
                )
            self.cut_too(graph, region)
        return PassStats(True, {"launches": len(self.plan.chunks)})


def _region(graph: fx.Graph, number: int, parts: int, along: str) -> Region | None:
    for product in collective_products(graph):
        if product.launch.meta.get(MEMBERS) != (number,):
            continue
        for _, cut in product.seeds:
            found = product.region(parts, cut)
            if found is not None and f"{found.launches[product.launch]}{CHUNKS}" == along:
                return found
    return None
