"""The few figures that stand at the top of every report, derived from the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_dist.reporting.records import RunReport
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

ONLY_OBSERVED = (
    'Stock Inductor compiled these graphs. What this plugin would do: compile with backend="dynamo_dist", '
    "or explain with --backend dynamo_dist."
)
WHY_RANKS_ARE_MISSING = (
    "Ranks of a fake group have no process, so none. Others: start all of them in the same way, and see "
    "whether they ended early."
)


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of one rank's graphs. Times are simulated, in microseconds, summed over the graphs.

    Peaks are the largest of any graph. ``break_places`` are lines, ``break_times`` how often Dynamo
    met one of them.
    """

    graphs: int
    break_places: int
    break_times: int
    errors: int
    recompiles: int
    launches: int
    launches_by_kind: tuple[tuple[str, int], ...]
    communication_us: float
    exposed_before_us: float
    exposed_after_us: float
    makespan_before_us: float
    makespan_after_us: float
    peak_before_bytes: int
    peak_after_bytes: int
    warnings: int
    orders_lost: int


def summarize(report: RunReport) -> Summary:
    """Totals of ``report``."""
    graphs = report.graphs
    kinds = Counter(c.kind for graph in graphs for c in graph.collectives)
    return Summary(
        graphs=len(graphs),
        break_places=len(report.breaks),
        break_times=sum(item.count for item in report.breaks),
        errors=sum(item.effect == "error" for item in report.breaks),
        recompiles=sum(item.count for item in report.recompiles),
        launches=sum(kinds.values()),
        launches_by_kind=tuple(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        communication_us=sum(g.after.communication_us for g in graphs),
        exposed_before_us=sum(g.before.exposed_us for g in graphs),
        exposed_after_us=sum(g.after.exposed_us for g in graphs),
        makespan_before_us=sum(g.before.makespan_us for g in graphs),
        makespan_after_us=sum(g.after.makespan_us for g in graphs),
        peak_before_bytes=max((g.before.peak_bytes for g in graphs), default=0),
        peak_after_bytes=max((g.after.peak_bytes for g in graphs), default=0),
        warnings=sum(len(g.warnings) for g in graphs),
        orders_lost=sum(g.order_kept is False for g in graphs),
    )


def why_no_graph(report: RunReport) -> str:
    """Return the reason why a report has no graph; "" if it has one."""
    if report.graphs:
        return ""
    if not report.torch_version:
        return "No process of this run called torch.compile."
    if any(item.effect == "error" for item in report.breaks):
        return "No graph was compiled: see the failed compile."
    return (
        "No graph came to Inductor: what torch.compile returned was never called, computes nothing with "
        "tensors, or has another backend than inductor and dynamo_dist, whose graphs are recorded."
    )


def is_only_observed(report: RunReport) -> bool:
    """Return whether stock Inductor compiled all graphs: they were looked at, and before and after are one."""
    return bool(report.graphs) and not any(graph.passes for graph in report.graphs)


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


def graph_titles(graphs: Sequence[GraphRecord]) -> list[str]:
    """``forward``, or ``forward 1``, ``forward 2`` where a phase has several graphs."""
    total = Counter(graph.phase for graph in graphs)
    seen: Counter[str] = Counter()
    titles = []
    for graph in graphs:
        seen[graph.phase] += 1
        several = total[graph.phase] > 1
        titles.append(f"{graph.phase} {seen[graph.phase]}" if several else graph.phase)
    return titles


def order_text(graph: GraphRecord) -> str:
    """Say whether the generated code keeps the order that the passes chose."""
    if graph.order_kept is None:
        return "generated code not looked at"
    if graph.order_kept:
        return "order kept in the generated code"
    return "order NOT kept in the generated code: what runs differs from the timeline below"
