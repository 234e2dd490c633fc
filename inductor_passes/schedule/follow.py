"""Launch as a plan says that was made for another rank's graph: in its order, in its buckets."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.errors import CannotFollowError
from inductor_passes.graph.collectives import MEMBERS, argument, group_name, is_launch, waits_of
from inductor_passes.graph_pass import GraphPass, Numerics, PassStats
from inductor_passes.ranks.collective_trace import LaunchPlan, what
from inductor_passes.schedule.apply import apply, read_sizes_of_inputs
from inductor_passes.schedule.extract import Extracted, extract
from inductor_passes.schedule.postconditions import Before, check


class FollowPlan(GraphPass):
    """Put the launches in the order of a plan, and merge those that it merges; the rest keeps its place.

    Where compute goes is left to the scheduler, which runs behind and keeps the order of launches.

    Requires: launches that bear the numbers of the program's (``ranks/collective_trace.py``).
    Ensures:  what ``Schedule`` ensures.
    Stats:    ``launches``, ``merged`` (launches in buckets).
    Raises CannotFollowError if the graph has not the launches of the plan, or needs them in another order.
    """

    name = "follow_plan"
    numerics = Numerics.REASSOCIATING
    keeps_launch_order = False

    def __init__(self, cost: CostModel, plan: LaunchPlan) -> None:
        self.cost = cost
        self.plan = plan

    def digest(self) -> str:
        return self.plan.text

    def run(self, graph: fx.Graph) -> PassStats:
        read_sizes_of_inputs(graph)
        wanted = self._nodes(graph)
        extracted = extract(graph, self.cost)
        buckets = [members for members in wanted if len(members) > 1]
        order = _order(extracted, wanted)
        before = Before.of(extracted)
        coalesced = [
            "coalesced" in planned.what
            for planned, members in zip(self.plan.launches, wanted, strict=True)
            if len(members) > 1
        ]
        made = apply(graph, order, buckets, self.cost, coalesced)
        check(before, graph, made, self.name)
        counters = {"launches": len(wanted), "merged": sum(map(len, buckets))}
        return PassStats(True, counters)

    def _nodes(self, graph: fx.Graph) -> list[list[fx.Node]]:
        """The nodes of each launch of the plan."""
        by_first = {
            node.meta[MEMBERS][0]: node
            for node in graph.nodes
            if is_launch(node) and node.meta.get(MEMBERS)
        }
        found = []
        for planned in self.plan.launches:
            members: list[fx.Node] = []
            left = list(planned.members)
            while left:
                node = by_first.pop(left[0], None)
                covers = () if node is None else node.meta[MEMBERS]
                if node is None or tuple(left[: len(covers)]) != tuple(covers):
                    raise CannotFollowError(f"The graph has no launch of its own for {planned}.")
                members.append(node)
                del left[: len(covers)]
            # Of the rank that planned, a pass may have made one launch of another kind or type, and not of this one.
            if len({(what(node), group_name(node)) for node in members}) > 1:
                here = " and ".join(dict.fromkeys(map(what, members)))
                raise CannotFollowError(f"The plan merges {planned}, which are {here} here.")
            if len(members) > 1 and not all(map(_has_equal_shares, members)):
                raise CannotFollowError(
                    f"The plan merges {planned}, of which one has unequal shares."
                )
            found.append(members)
        if by_first:
            raise CannotFollowError(f"The plan leaves out {len(by_first)} launches of the graph.")
        return found


def _has_equal_shares(launch: fx.Node) -> bool:
    """Return whether an exchange gives every rank as much; true for other collectives."""
    shares = (argument(launch, name) for name in ("input_split_sizes", "output_split_sizes"))
    return all(len(set(each)) < 2 for each in shares if isinstance(each, (list, tuple)))


def _order(extracted: Extracted, wanted: Sequence[Sequence[fx.Node]]) -> list[fx.Node]:
    """The nodes with launches in the order wanted, members of a bucket and their waits side by side."""
    place = {node: i for i, node in enumerate(extracted.nodes) if node is not None}
    head = list(range(len(extracted.nodes)))  # of what must stand together
    together: dict[int, list[int]] = {}
    for members in wanted:
        if len(members) < 2:
            continue
        waits = [wait for member in members for wait in waits_of(member)]
        if len(waits) != len(members):
            raise CannotFollowError("A launch that the plan merges has not one wait of its own.")
        for side in (members, waits):
            ids = sorted(place[node] for node in side)
            together[ids[0]] = ids
            for i in ids:
                head[i] = ids[0]
    behind: dict[int, set[int]] = {}
    launches = [place[members[0]] for members in wanted]
    for earlier, later in itertools.pairwise(launches):
        behind.setdefault(head[later], set()).add(head[earlier])
    for i, number in enumerate(extracted.problem.nodes):
        behind.setdefault(head[i], set()).update(head[d] for d in number.deps)
    order = []
    for i in _sorted(behind):
        order.extend(together.get(i, [i]))
    return extracted.order(order)


def _sorted(behind: dict[int, set[int]]) -> list[int]:
    users: dict[int, list[int]] = {i: [] for i in behind}
    missing = {}
    for i, sources in behind.items():
        if i in sources:
            raise CannotFollowError(
                "A launch that the plan merges needs another one of its bucket."
            )
        missing[i] = len(sources)
        for source in sources:
            users[source].append(i)
    ready = [i for i, count in missing.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        i = heapq.heappop(ready)
        order.append(i)
        for user in users[i]:
            missing[user] -= 1
            if not missing[user]:
                heapq.heappush(ready, user)
    if len(order) < len(behind):
        raise CannotFollowError("The graph needs its launches in another order than the plan's.")
    return order
