"""A report of a run for the terminal: where ranks differ, breaks, plans, and the graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dynamo_dist.reporting.merge import MergedReport
from dynamo_dist.reporting.records import BreakRecord, Fact, PlanRecord, RunReport
from dynamo_dist.reporting.summary import (
    EFFECTS,
    ONLY_OBSERVED,
    WHY_RANKS_ARE_MISSING,
    is_only_observed,
    why_no_graph,
)
from inductor_passes.report import figures
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

if TYPE_CHECKING:
    from rich.console import Console


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
        f"plan {plan.graph} ({plan.method}): {len(plan.changes)} of {counted(plan.steps, 'step')} changed; "
        f"{us_text(plan.stock_us)} -> {us_text(plan.planned_us)}, bound {us_text(plan.bound_us)}, modelled",
        "bold",
    )
    for step in plan.changes[:MOST_NOTES]:
        line(console, f"  {step.op}: {', '.join(step.stock)} -> {', '.join(step.planned)}")
    if len(plan.changes) > MOST_NOTES:
        line(console, f"  and {len(plan.changes) - MOST_NOTES} more", "dim")
    if plan.source:
        line(console, f"  read from {plan.source}")
