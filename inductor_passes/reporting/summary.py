"""The few figures that stand at the top of every report, and what it says of a graph, in a reader's words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from inductor_passes.records import CollectiveRecord, GraphRecord

# What the scheduler says of an exposed collective, in a reader's words.
WHY_EXPOSED = {
    "data": "it starts once its input is there; nothing independent is left to compute meanwhile",
    "channel": "its group was busy with other collectives",
    "memory cap": "an earlier start would exceed the memory cap",
    "at the bound": "no schedule is shorter",
    "order": "it could start earlier, but no better schedule was found",
    "no gain": "the program's order was left alone: none that was found saves 1 %",
}


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of one rank's graphs. Times are simulated, in microseconds, summed over the graphs.

    Peaks are the largest of any graph.
    """

    graphs: int
    launches: int
    launches_by_kind: tuple[tuple[str, int], ...]
    communication_us: float
    exposed_before_us: float
    exposed_after_us: float
    makespan_before_us: float
    makespan_after_us: float
    peak_before_bytes: int
    peak_after_bytes: int


def totals(graphs: Sequence[GraphRecord]) -> Totals:
    """Add up ``graphs``."""
    kinds = Counter(c.kind for graph in graphs for c in graph.collectives)
    return Totals(
        graphs=len(graphs),
        launches=sum(kinds.values()),
        launches_by_kind=tuple(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        communication_us=sum(g.after.communication_us for g in graphs),
        exposed_before_us=sum(g.before.exposed_us for g in graphs),
        exposed_after_us=sum(g.after.exposed_us for g in graphs),
        makespan_before_us=sum(g.before.makespan_us for g in graphs),
        makespan_after_us=sum(g.after.makespan_us for g in graphs),
        peak_before_bytes=max((g.before.peak_bytes for g in graphs), default=0),
        peak_after_bytes=max((g.after.peak_bytes for g in graphs), default=0),
    )


@dataclass(frozen=True, slots=True)
class Collectives:
    """Launches of one graph that differ in time alone: ``first`` stands for all; times are sums."""

    first: CollectiveRecord
    count: int
    exposed_before_us: float
    exposed_after_us: float
    why_exposed: str


def alike(collectives: Sequence[CollectiveRecord]) -> list[Collectives]:
    """Launches put together by line, kind, cause, size and group; the most exposed first."""
    groups: dict[tuple[object, ...], list[CollectiveRecord]] = {}
    for c in collectives:
        key = (c.stack, c.kind, c.cause, c.payload_bytes, c.dtype, c.reduce_op, c.group_name)
        groups.setdefault(key, []).append(c)
    found = [
        Collectives(
            first=members[0],
            count=len(members),
            exposed_before_us=sum(c.exposed_before_us for c in members),
            exposed_after_us=sum(c.exposed_after_us for c in members),
            why_exposed=max(members, key=lambda c: c.exposed_after_us).why_exposed,
        )
        for members in groups.values()
    ]
    return sorted(found, key=lambda group: -group.exposed_after_us)


def titled(graphs: Sequence[GraphRecord]) -> list[tuple[str, GraphRecord]]:
    """Graphs with titles: ``forward``, or ``forward 1``, ``forward 2`` where a phase has several."""
    total = Counter(graph.phase for graph in graphs)
    seen: Counter[str] = Counter()
    found = []
    for graph in graphs:
        seen[graph.phase] += 1
        several = f" {seen[graph.phase]}" if total[graph.phase] > 1 else ""
        found.append((graph.phase + several, graph))
    return found


def order_text(graph: GraphRecord) -> str:
    """Say whether the generated code keeps the order that the passes chose."""
    if graph.order_kept is None:
        return "generated code not looked at"
    if graph.order_kept:
        return "order kept in the generated code"
    return "order NOT kept in the generated code: what runs differs from the timeline below"
