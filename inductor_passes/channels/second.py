"""The pass that lets launches go on clones of their groups, where that is predicted to pay."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Sequence

from torch import fx

from inductor_passes.base import GraphPass, Numerics, PassContext, PassStats
from inductor_passes.errors import InvariantError, PreconditionError
from inductor_passes.graph import channels
from inductor_passes.graph.collectives import argument, group_name, is_launch, kind, set_group
from inductor_passes.graph.hazards import shows_that_ranks_differ
from inductor_passes.machine import CostModel
from inductor_passes.records import ONE_SIDED
from inductor_passes.schedule.graph.schedule import LEAST_GAIN, ScheduleGraph
from inductor_passes.schedule_options import ScheduleOptions

log = logging.getLogger(__name__)


class SecondChannels(GraphPass):
    """Let some launches go on the clones of their groups, so that they wait for no other launch of theirs.

    Tried are: what depends on no launch (gathers of parameters), what only the graph's outputs wait for (reductions of
    gradients), and both; each is scheduled, and the shortest is kept if it is 1 % shorter than on one channel. Launches on their way
    at once share the link in all prices; only start-ups overlap.

    Requires: groups that ``clone_groups`` has cloned, else it warns and does nothing; a graph that ranks share.
    Ensures:  nothing changes but the groups of launches, each to one of the same ranks.
    Stats:    ``launches`` (on second channels).
    """

    name = "second_channels"
    numerics = Numerics.BITWISE
    changes_launches = True
    keeps_launch_order = False

    def __init__(
        self,
        cost: CostModel,
        schedule: ScheduleOptions = ScheduleOptions(),
        *,
        exact: bool = False,
    ) -> None:
        self.cost, self.schedule, self.exact = cost, schedule, exact
        self._groups: dict[fx.Node, str] = {}

    @classmethod
    def build(cls, context: PassContext) -> SecondChannels:
        return cls(context.cost, context.schedule, exact=context.exact)

    def digest(self) -> str:
        return (
            f"{sorted(channels.known().items())} {self.schedule} {self.exact} {self.cost.digest()}"
        )

    def requires(self, graph: fx.Graph) -> None:
        if shows_that_ranks_differ(graph):
            raise PreconditionError(
                f"{self.name} needs a graph whose launches are alike on all ranks.",
                "Which launch goes on which channel depends on sizes, and other ranks may see others.",
                "Compile with static sizes (dynamic=False), or leave the option 'channels' out.",
            )

    def run(self, graph: fx.Graph) -> PassStats:
        launches = [n for n in graph.nodes if is_launch(n) and kind(n) not in ONE_SIDED]
        self._groups = {n: group_name(n) for n in launches}
        launches = [n for n in launches if isinstance(argument(n, "group_name"), str)]
        movable = {n: c for n in launches if (c := channels.second(group_name(n))) is not None}
        if not movable:
            if launches:
                _say_once(tuple(sorted(set(self._groups.values()))))
            return PassStats(False)
        scheduler = ScheduleGraph(self.cost, self.schedule, exact=self.exact)
        one_us = best_us = _scheduled_us(graph, scheduler)
        best: list[fx.Node] = []
        tried: list[str] = []
        for chosen in _candidates(graph, movable):
            _put(chosen, movable)
            took = _scheduled_us(graph, scheduler)
            _put(chosen, self._groups)
            tried.append(f"{took:.0f} with {len(chosen)} there")
            if took < best_us and took <= one_us * (1 - LEAST_GAIN):
                best, best_us = chosen, took
        _put(best, movable)
        note = f"{len(best)} of {len(movable)} launches on second channels: {best_us:.0f} us scheduled, {one_us:.0f} on one"
        note += "; tried " + (", ".join(tried) or "nothing: all launches are alike")
        return PassStats(bool(best), {"launches": len(best)}, notes=(note,))

    def ensures(self, before: Sequence[fx.Node], graph: fx.Graph) -> None:
        for node, was in self._groups.items():
            if channels.link_of(group_name(node)) != channels.link_of(was):
                raise InvariantError(
                    f"The pass {self.name} put %{node.name} on group {group_name(node)}, no clone of {was}."
                )


def _put(launches: Collection[fx.Node], groups: dict[fx.Node, str]) -> None:
    for launch in launches:
        set_group(launch, groups[launch])


def _candidates(graph: fx.Graph, movable: Collection[fx.Node]) -> list[list[fx.Node]]:
    """Sets of launches that may go on second channels, none empty; never all of them: that is one channel again."""
    first = [n for n in movable if n in _behind_none(graph)]
    last = [n for n in movable if n in _before_none(graph)]
    found: list[list[fx.Node]] = []
    for chosen in (first, last, [n for n in movable if n in {*first, *last}]):
        if chosen and len(chosen) < len(movable) and chosen not in found:
            found.append(chosen)
    return found


def _behind_none(graph: fx.Graph) -> set[fx.Node]:
    """Launches that depend on no launch."""
    behind: set[fx.Node] = set()
    for node in graph.nodes:
        if any(source in behind or is_launch(source) for source in node.all_input_nodes):
            behind.add(node)
    return {node for node in graph.nodes if is_launch(node) and node not in behind}


def _before_none(graph: fx.Graph) -> set[fx.Node]:
    """Launches on which no launch depends."""
    before: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if any(user in before or is_launch(user) for user in node.users):
            before.add(node)
    return {node for node in graph.nodes if is_launch(node) and node not in before}


def _scheduled_us(graph: fx.Graph, scheduler: ScheduleGraph) -> float:
    solution, refused = scheduler.plan(graph, scheduler.extract(graph))
    return solution.original_makespan_us if refused else solution.makespan_us


@functools.cache
def _say_once(groups: tuple[str, ...]) -> None:
    log.warning(
        "Option 'channels' is 2, and no group of the graph has a second channel: it does nothing. Groups are %s. Call "
        "inductor_passes.clone_groups(mesh) on all ranks, after the mesh is made and before compiling.",
        ", ".join(groups),
    )
