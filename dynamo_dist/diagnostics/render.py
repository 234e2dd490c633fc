"""Render a report of a run as text or HTML, and write it to disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_dist.diagnostics.merge import MergedReport
from dynamo_dist.diagnostics.records import BreakRecord, Fact, PlanRecord, RunReport
from inductor_passes.report import figures
from inductor_passes.report import report as of_graphs
from inductor_passes.report.figures import rank_list
from inductor_passes.report.render_html import page
from inductor_passes.report.render_text import (
    MOST_NOTES,
    ascii_only,
    counted,
    line,
    number,
    print_graphs,
    terminal,
    us_text,
)
from inductor_passes.simulate import joined_traces

if TYPE_CHECKING:
    from rich.console import Console

ONLY_OBSERVED = (
    "Upstream Inductor compiled these graphs. What this plugin would do: compile with "
    'backend="dynamo_dist", '
    "or explain with --backend dynamo_dist."
)
WHY_RANKS_ARE_MISSING = (
    "Ranks of a fake group have no process, so none. Others: start all of them in the same way, "
    "and see whether they ended early."
)
EFFECTS = {
    "split": "splits the graph",
    "eager": "the rest runs eagerly",
    "error": "the compile failed",
}


def why_no_graph(report: RunReport) -> str:
    """Return the reason why a report has no graph; "" if it has one."""
    if report.graphs:
        return ""
    if not report.torch_version:
        return "No process of this run called torch.compile."
    if any(item.effect == "error" for item in report.breaks):
        return "No graph was compiled: see the failed compile."
    return (
        "No graph came to Inductor: what torch.compile returned was never called, computes nothing "
        "with tensors, or has another backend than inductor and dynamo_dist, whose graphs are "
        "recorded."
    )


def is_only_observed(report: RunReport) -> bool:
    """Return whether upstream Inductor compiled all graphs: they were looked at, and before and
    after are one.
    """
    return bool(report.graphs) and not any(graph.passes for graph in report.graphs)


def render_text(report: RunReport | MergedReport, console: Console | None = None) -> None:
    """Print to ``console``, by default standard output; colour where the terminal has it."""
    console = console or terminal()
    if isinstance(report, MergedReport):
        _ranks(console, report)
        report = report.first
    run = report
    places, times = len(run.breaks), sum(item.count for item in run.breaks)
    breaks = number(places) + (f" (met {counted(times, 'time')})" if times > places else "")
    print_graphs(
        run,
        console,
        name="dynamo_dist",
        rows=[("graph breaks", breaks)],
        between=lambda console: _run(console, run),
    )


def _run(console: Console, report: RunReport) -> None:
    """Tell what is of no graph."""
    if note := ONLY_OBSERVED if is_only_observed(report) else why_no_graph(report):
        line(console, f"  {note}")
    for item in report.breaks:
        _break(console, item)
    if report.recompiles or report.facts:
        line(console, "")
    for recompile in report.recompiles:
        where = figures.split_line(recompile.user_line)[0]
        times = counted(recompile.count, "time")
        line(console, f"recompiled {times}: {recompile.function} ({where}): {recompile.guard}")
    for fact in report.facts:
        _fact(console, fact)
    for plan in report.plans:
        _plan(console, plan)


def _ranks(console: Console, merged: MergedReport) -> None:
    count = counted(len(merged.reports), "rank")
    if not merged.differences and len(merged.reports) > 1:
        line(console, f"{count} agree in breaks, graphs, launches, payloads and order.")
    elif merged.differences:
        line(console, "RANKS DIFFER; ranks that launch in another order hang.", "bold red")
    for difference in merged.differences:
        for value, ranks in difference.values:
            where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {figures.rank_list(ranks)}"
            line(console, f"  {difference.what}: {value} on {where}")
    if merged.missing:
        line(console, f"No report from rank {figures.rank_list(merged.missing)}.", "bold red")
        line(console, f"  {WHY_RANKS_ARE_MISSING}")


def _break(console: Console, item: BreakRecord) -> None:
    times = f", {counted(item.count, 'time')}" if item.count > 1 else ""
    line(console, "")
    line(console, f"BREAK {item.kind} ({EFFECTS[item.effect]}{times})", "bold red")
    if item.user_line:
        line(console, f"  {item.user_line}")
    line(console, f"  why: {item.explanation}")
    if item.fix:
        line(console, "  fix:")
        for code in item.fix.splitlines():
            line(console, f"    {code}", "cyan")


def _fact(console: Console, fact: Fact) -> None:
    value = figures.fact_text(fact.value, fact.unit)
    if not isinstance(fact.value, str):
        value = ascii_only(value)
    if isinstance(fact.value, tuple) and len(fact.value) > 1:
        value += f" over {len(fact.value)} values"
    source = f" ({fact.source})" if fact.source else ""
    line(console, f"{fact.name}: {value}{source}")


def _plan(console: Console, plan: PlanRecord) -> None:
    line(console, "")
    line(
        console,
        f"plan {plan.graph} ({plan.method}): {len(plan.changes)} of {counted(plan.steps, 'step')} "
        f"changed; {us_text(plan.upstream_us)} -> {us_text(plan.planned_us)}, bound "
        f"{us_text(plan.bound_us)}, modelled",
        "bold",
    )
    for step in plan.changes[:MOST_NOTES]:
        line(console, f"  {step.op}: {', '.join(step.upstream)} -> {', '.join(step.planned)}")
    if len(plan.changes) > MOST_NOTES:
        line(console, f"  and {len(plan.changes) - MOST_NOTES} more", "dim")
    if plan.source:
        line(console, f"  read from {plan.source}")


def render_html(report: RunReport | MergedReport) -> str:
    """The whole page. A merged report shows where ranks differ, then the lowest rank's graphs."""
    merged = report if isinstance(report, MergedReport) else None
    run = report.first if isinstance(report, MergedReport) else report
    return page(
        run,
        "report.html.j2",
        __package__,
        merged=merged,
        why_no_graph=why_no_graph(run),
        only_observed=ONLY_OBSERVED if is_only_observed(run) else "",
        why_ranks_are_missing=WHY_RANKS_ARE_MISSING,
        effects=EFFECTS,
        rank_list=rank_list,
        sparkline=_sparkline,
    )


def _sparkline(values: Sequence[float], width: int = 120, height: int = 24) -> str:
    """Points of a polyline through ``values``, scaled to the box; numbers only."""
    finite = [v for v in values if abs(v) != float("inf") and v == v]
    if len(finite) < 2:
        return ""
    low, high = min(finite), max(finite)
    spread = (high - low) or 1.0
    return " ".join(
        f"{i * width / (len(finite) - 1):.1f},{height - 2 - (v - low) / spread * (height - 4):.1f}"
        for i, v in enumerate(finite)
    )


def write_report(
    report: RunReport | MergedReport, directory: str | os.PathLike[str]
) -> tuple[Path, ...]:
    """Write ``report.html``, ``report.json`` and ``trace.json``; the paths written.

    Names carry the rank (``report.rank3.html``) where the run has several and ``report`` is one
    rank's. If the folder cannot be written, warns and returns ().
    """
    return of_graphs.write_graphs(report, directory, render_html, trace)


def trace(report: RunReport | MergedReport) -> dict[str, object]:
    """The timelines of all graphs, before and after, as one Chrome trace; of every rank there
    is.
    """
    if isinstance(report, MergedReport):
        return joined_traces([of_graphs.trace(of_rank) for of_rank in report.reports])
    return of_graphs.trace(report)
