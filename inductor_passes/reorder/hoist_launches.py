"""Start collectives early enough that compute covers them, and no earlier."""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from collections.abc import Sequence

from torch import fx

from inductor_passes.base import PassContext, PassStats
from inductor_passes.graph.collectives import (
    group_name,
    is_launch,
    is_wait,
    kind,
    output_bytes,
    waits_of,
)
from inductor_passes.graph.hazards import BARRIERS
from inductor_passes.graph.order import relink
from inductor_passes.machine import CostModel
from inductor_passes.reorder.base import Reorder

# A launch may take this many cheap nodes (casts, views, packing) along.
MAX_CONE = 32


class HoistLaunches(Reorder):
    """Move each launch up until the compute between it and its wait is predicted to cover it.

    As late as possible: a launch starts ``lead`` times its predicted duration before its wait,
    earlier where collectives of the same group queue behind it, and never above what it reads.
    Cheap nodes that lead to the launch's input move along. No launch moves up while the results
    in flight, from launch to wait, would exceed ``budget_bytes``.

    A barrier stays where it is, and no launch passes one.

    With ``keep_order`` launches keep their order over all groups, for graphs that ranks hold in different forms.

    Requires: a functional graph.
    Ensures:  same nodes, same launch order within each group; a second run changes nothing.
    Stats:    ``launches``, ``launches_hoisted``.
    """

    name = "hoist_launches"

    def __init__(
        self,
        cost: CostModel,
        *,
        budget_bytes: int = 1 << 30,
        lead: float = 1.25,
        keep_order: bool = False,
    ) -> None:
        self.cost = cost
        self.budget_bytes = budget_bytes
        self.lead = lead
        self.keep_order = keep_order

    @classmethod
    def build(cls, context: PassContext) -> HoistLaunches:
        return cls(context.cost, keep_order=context.ranks_differ)

    def digest(self) -> str:
        return f"{self.budget_bytes} {self.lead} {self.keep_order} {self.cost.digest()}"

    def run(self, graph: fx.Graph) -> PassStats:
        nodes = list(graph.nodes)
        index = {node: i for i, node in enumerate(nodes)}
        compute_us = [self.cost.compute_us(node) for node in nodes]
        cones = {n: self._cone(n, index, compute_us) for n in nodes if is_launch(n)}
        fence = 0  # a barrier stays where it is, and nothing passes it
        for launch, (cone, earliest) in cones.items():
            if kind(launch) in BARRIERS:
                cones[launch] = [], index[launch]
                fence = index[launch] + 1
            else:
                cones[launch] = cone, max(earliest, fence)
        for cone, _ in cones.values():
            for node in cone:  # wherever it stands, it stands before the launch: it hides nothing
                compute_us[index[node]] = 0.0
        queues = self._targets(nodes, index, compute_us, cones)
        order = self._emit(nodes, index, queues, cones)
        moved = _moved_up(nodes, order)
        relink(graph, order)
        total = sum(1 for node in nodes if is_launch(node))
        return PassStats(moved > 0, {"launches": total, "launches_hoisted": moved})

    def _targets(
        self,
        nodes: list[fx.Node],
        index: dict[fx.Node, int],
        compute_us: list[float],
        cones: dict[fx.Node, tuple[list[fx.Node], int]],
    ) -> dict[str, deque[tuple[int, fx.Node]]]:
        """Per group its launches, in program order, with the index each should stand at."""
        starts_at = [0.0]  # compute time before node i, were there no communication
        for us in compute_us:
            starts_at.append(starts_at[-1] + us)
        by_group: dict[str, list[fx.Node]] = {}
        for launch in cones:
            # Ranks that order launches of different groups differently may wait for one another in a circle.
            group = "" if self.keep_order else group_name(launch)
            by_group.setdefault(group, []).append(launch)
        queues: dict[str, deque[tuple[int, fx.Node]]] = {}
        for group, members in by_group.items():
            wanted: list[int] = []
            channel_free = starts_at[-1]
            for launch in reversed(members):
                waits = waits_of(launch)
                needed = min((starts_at[index[w]] for w in waits), default=starts_at[-1])
                duration = self.cost.launch_us(launch)
                channel_free = min(needed, channel_free) - duration
                latest = channel_free - (self.lead - 1.0) * duration
                wanted.append(max(0, bisect.bisect_right(starts_at, latest) - 1))
            queue: deque[tuple[int, fx.Node]] = deque()
            at = 0
            for launch, want in zip(members, reversed(wanted), strict=True):
                at = max(at, min(max(want, cones[launch][1]), index[launch]))
                queue.append((at, launch))
            queues[group] = queue
        return queues

    def _cone(
        self, launch: fx.Node, index: dict[fx.Node, int], compute_us: list[float]
    ) -> tuple[list[fx.Node], int]:
        """Cheap ancestors that can move with the launch, and the first index they all can stand at."""
        cheap_us = 0.1 * self.cost.launch_us(launch)
        cone: list[fx.Node] = []
        seen = {launch}
        stack = list(launch.all_input_nodes)
        earliest = 0
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            movable = (
                node.op == "call_function"
                and not is_wait(node)
                and not is_launch(node)
                and compute_us[index[node]] <= cheap_us
                and len(cone) < MAX_CONE
            )
            if movable:
                cone.append(node)
                cheap_us -= compute_us[index[node]]
                stack.extend(node.all_input_nodes)
            else:
                earliest = max(earliest, index[node] + 1)
        cone.sort(key=index.__getitem__)
        return cone, earliest

    def _emit(
        self,
        nodes: list[fx.Node],
        index: dict[fx.Node, int],
        queues: dict[str, deque[tuple[int, fx.Node]]],
        cones: dict[fx.Node, tuple[list[fx.Node], int]],
    ) -> list[fx.Node]:
        order: list[fx.Node] = []
        placed: set[fx.Node] = set()
        landings: list[tuple[int, int]] = []  # (index of the first wait, bytes), soonest first
        in_flight = 0

        def place(node: fx.Node) -> None:
            nonlocal in_flight
            if node in placed:
                return
            placed.add(node)
            order.append(node)
            if node in cones:
                landing = min((index[w] for w in waits_of(node)), default=len(nodes))
                heapq.heappush(landings, (landing, output_bytes(node)))
                in_flight += output_bytes(node)

        body = next((i for i, node in enumerate(nodes) if node.op != "placeholder"), len(nodes))
        for i, node in enumerate(nodes):
            while landings and landings[0][0] < i:
                in_flight -= heapq.heappop(landings)[1]
            for queue in queues.values() if i >= body else ():
                while queue and queue[0][0] <= i:
                    launch = queue[0][1]
                    is_early = index[launch] > i
                    if is_early and in_flight + output_bytes(launch) > self.budget_bytes:
                        break  # looked at again at the next node, when something may have landed
                    queue.popleft()
                    for ancestor in cones[launch][0]:
                        place(ancestor)
                    place(launch)
            place(node)
        return order


def _moved_up(before: Sequence[fx.Node], after: Sequence[fx.Node]) -> int:
    """Launches that passed at least one node that is not a launch and did not move with them."""
    old = {node: i for i, node in enumerate(before)}
    moved, lowest = 0, len(before)
    for node in reversed(after):
        if is_launch(node):
            moved += lowest < old[node]
        else:
            lowest = min(lowest, old[node])
    return moved
