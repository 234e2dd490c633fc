"""Cut a graph as a plan says that was made for another rank's graph."""

from __future__ import annotations

from torch import fx

from inductor_passes.base import PassStats
from inductor_passes.errors import CannotFollowError
from inductor_passes.graph.numbers import MEMBERS
from inductor_passes.split.base import Following
from inductor_passes.split.candidates import regions
from inductor_passes.split.region import Positions, Region, spread


class FollowSplit(Following):
    """Cut the launches that a plan cuts, in as many parts, which lie alike.

    Requires: launches that bear the numbers of the program's (``agree/graph.py``), and what ``SplitRegions`` requires.
    Ensures:  what ``SplitRegions`` ensures.
    Stats:    ``launches`` (that were cut).
    Raises CannotFollowError if no region of the graph has just these launches in such parts.
    """

    name = "follow_split"

    def run(self, graph: fx.Graph) -> PassStats:
        wanted = self.plan.parts
        region = self._region(graph, wanted)
        if region is None:
            raise CannotFollowError(
                f"The graph has no region with the parts of the plan: {wanted}."
            )
        made = self.cut(graph, region)
        return PassStats(True, {"launches": len(made.made)})

    def _region(self, graph: fx.Graph, wanted: dict[int, tuple[int, str]]) -> Region | None:
        counts = {parts for parts, _ in wanted.values()}
        if len(counts) != 1:
            return None
        (parts,) = counts
        for region in regions(graph, parts):
            launches = [n for n in region.launches if n.meta.get(MEMBERS, (-1,))[0] in wanted]
            found = spread(Positions(graph), region.seed, region.cut, parts, launches)
            if {
                n.meta[MEMBERS][0]: (parts, along) for n, along in found.launches.items()
            } == wanted:
                return found
        return None
