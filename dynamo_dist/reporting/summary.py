"""The few figures that stand at the top of every report, derived from the records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dynamo_dist.reporting.records import RunReport
from inductor_passes.records import GraphRecord


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
    """Whether the generated code keeps the order that the passes chose."""
    if graph.order_kept is None:
        return "generated code not looked at"
    if graph.order_kept:
        return "order kept in the generated code"
    return "order NOT kept in the generated code: what runs differs from the timeline below"
