"""Cut a graph as a plan says that was made for another rank's graph."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from inductor_passes.errors import CannotFollowError, PreconditionError
from inductor_passes.graph.collectives import MEMBERS
from inductor_passes.graph.dependencies import launches_show_that_ranks_differ
from inductor_passes.graph_pass import PassStats
from inductor_passes.ranks.collective_trace import LaunchPlan
from inductor_passes.split.candidates import from_inputs, from_inside
from inductor_passes.split.price import backward_of
from inductor_passes.split.region import Positions, Region, spread
from inductor_passes.split.rules.rule import unequal_parts
from inductor_passes.split.split_pass import Cutting


class FollowSplit(Cutting):
    """Cut the launches that a plan cuts, in as many parts, which lie alike.

    The rank that made the plan may have other rows, so parts may be unequal here, and sizes symbols (``rules/pieces.py``).

    Requires: launches that bear the numbers of the program's (``ranks/collective_trace.py``), and what ``SplitRegions`` requires.
    Ensures:  what ``SplitRegions`` ensures.
    Stats:    ``launches`` (that were cut).
    Raises CannotFollowError if no regions of the graph have just these launches in such parts.
    """

    name = "follow_split"

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

    def _may_differ(self, graph: fx.Graph) -> bool:
        return launches_show_that_ranks_differ(graph)

    def run(self, graph: fx.Graph) -> PassStats:
        with unequal_parts():
            return self._follow(graph)

    def _follow(self, graph: fx.Graph) -> PassStats:
        wanted = self.plan.parts
        found = _regions(graph, wanted, lean=False) or _regions(graph, wanted, lean=True)
        if found is None:
            raise CannotFollowError(
                f"The graph has no regions with the parts of the plan: {wanted}."
            )
        made = self.cut_each(graph, found)
        return PassStats(True, {"launches": sum(len(cutter.made) for cutter in made)})


def _regions(
    graph: fx.Graph, wanted: Mapping[int, tuple[int, str]], *, lean: bool
) -> list[Region] | None:
    """Regions with just these launches in such parts: those that have most of them, one after the other.

    ``lean``: no more of each than its launches need, so that it takes nothing that another needs.
    """
    found: list[Region] = []
    left = dict(wanted)
    while left:
        best: Region | None = None
        for region in _offered(graph, left, found):
            if best is None or len(region.launches) > len(best.launches):
                best = region
            if len(best.launches) == len(left):
                break
        if best is None:
            return None
        found.append(best.lean() if lean else best)
        for launch in best.launches:
            del left[launch.meta[MEMBERS][0]]
    return found


def _offered(
    graph: fx.Graph, wanted: Mapping[int, tuple[int, str]], there: Sequence[Region]
) -> Iterator[Region]:
    """Regions beside those that are ``there``, which hold some of the launches in such parts, and no other launch in parts."""
    taken = {node for region in there for node in region.steps}
    positions, late = Positions(graph), backward_of(graph)
    early = frozenset(node for node in graph.nodes if node not in late)
    for parts in sorted({parts for parts, _ in wanted.values()}):
        front = list(from_inputs(graph, parts))
        inside = from_inside(graph, parts, [*front, *there], taken)
        for region in (*front, *inside):
            if taken:
                region = spread(positions, region.seed, region.cut, parts, without=taken)
            fitting = [
                n for n, along in region.launches.items() if _is_wanted(n, parts, along, wanted)
            ]
            if not fitting:
                continue
            its = spread(positions, region.seed, region.cut, parts, fitting, without=taken)
            # A half of a joint graph that has none of them is left whole.
            for half in (late, early):
                if half and its.launches.keys() <= half:
                    its = spread(positions, region.seed, region.cut, parts, fitting).only(
                        {node for node in half if node not in taken}
                    )
            fit = (_is_wanted(n, parts, along, wanted) for n, along in its.launches.items())
            if its.launches and all(fit):
                yield its


def _is_wanted(
    launch: fx.Node, parts: int, along: str, wanted: Mapping[int, tuple[int, str]]
) -> bool:
    return wanted.get(launch.meta.get(MEMBERS, (-1,))[0]) == (parts, along)
