"""Compute collective products in chunks as a plan says that was made for another rank's graph."""

from __future__ import annotations

from torch import fx

from inductor_passes.agree.plan import LaunchPlan
from inductor_passes.base import PassStats
from inductor_passes.errors import CannotFollowError, PreconditionError
from inductor_passes.graph.numbers import CHUNKS, MEMBERS
from inductor_passes.split.base import Cutting
from inductor_passes.split.products import collective_products
from inductor_passes.split.region import Region


class FollowChunks(Cutting):
    """Chunk the collective products whose launches a plan chunks, in as many chunks, which lie alike.

    Requires: launches that bear the numbers of the program's (``agree/graph.py``), and what ``ChunkProducts`` requires.
    Ensures:  what ``ChunkProducts`` ensures.
    Stats:    ``launches`` (that were cut).
    Raises CannotFollowError if a launch is of no collective product of the graph that has such chunks.
    """

    name = "follow_chunks"

    def __init__(self, plan: LaunchPlan) -> None:
        super().__init__()
        self.plan = plan

    def digest(self) -> str:
        return self.plan.text

    def requires(self, graph: fx.Graph) -> None:
        try:
            super().requires(graph)
        except PreconditionError as error:
            raise CannotFollowError(str(error)) from error

    def run(self, graph: fx.Graph) -> PassStats:
        for number, (parts, along) in self.plan.chunks.items():
            region = _region(graph, number, parts, along)
            if region is None:
                raise CannotFollowError(
                    f"The graph has no collective product with launch {number} in {parts} chunks along {along}."
                )
            before, returned = self._cut, self._returned
            self.cut(graph, region)
            self._cut, self._returned = [*before, *self._cut], returned or self._returned
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
