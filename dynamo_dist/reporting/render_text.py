"""A report for the terminal: the same figures as the page, without the picture."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dynamo_dist.reporting import units
from dynamo_dist.reporting.merge import MergedReport
from dynamo_dist.reporting.records import BreakRecord, Fact, PlanRecord, RunReport
from dynamo_dist.reporting.summary import (
    ONLY_OBSERVED,
    WHY_EXPOSED,
    WHY_RANKS_ARE_MISSING,
    Collectives,
    Summary,
    alike,
    graph_titles,
    is_only_observed,
    order_text,
    summarize,
    why_no_graph,
)
from inductor_passes.records import GraphRecord, PassRecord, ScheduleRecord

if TYPE_CHECKING:
    from rich.console import Console

_EFFECTS = {
    "split": "splits the graph",
    "eager": "the rest runs eagerly",
    "error": "the compile failed",
}
_SIGNS = {
    ord("\N{MICRO SIGN}"): "u",
    ord("\N{MINUS SIGN}"): "-",
    ord("\N{NARROW NO-BREAK SPACE}"): " ",
    ord("\N{RIGHTWARDS ARROW}"): "->",
}
# More would not help on a terminal; the page has them all.
_MOST_COLLECTIVES = 20
_MOST_NOTES = 10
# A node's name in a note: without it alike decisions are one.
_NODE = re.compile(r" %\w+")


def render_text(report: RunReport | MergedReport, console: Console | None = None) -> None:
    """Print to ``console``, by default standard output; colour where the terminal has it."""
    if console is None:
        from rich.console import Console

        console = Console(highlight=False, soft_wrap=False)
    if isinstance(report, MergedReport):
        _ranks(console, report)
        report = report.first
    _head(console, report)
    summary = summarize(report)
    _summary(console, report, summary)
    for item in report.breaks:
        _break(console, item)
    if report.recompiles or report.facts:
        _line(console, "")
    for recompile in report.recompiles:
        where = units.split_line(recompile.user_line)[0]
        times = _count(recompile.count, "time")
        _line(console, f"recompiled {times}: {recompile.function} ({where}): {recompile.guard}")
    for fact in report.facts:
        _fact(console, fact)
    for plan in report.plans:
        _plan(console, plan)
    for title, graph in zip(graph_titles(report.graphs), report.graphs, strict=True):
        _graph(console, title, graph)


def _ranks(console: Console, merged: MergedReport) -> None:
    count = _count(len(merged.reports), "rank")
    if not merged.differences and len(merged.reports) > 1:
        _line(console, f"{count} agree in breaks, graphs, launches, payloads and order.")
    elif merged.differences:
        _line(console, "RANKS DIFFER; ranks that launch in another order hang.", "bold red")
    for difference in merged.differences:
        for value, ranks in difference.values:
            where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {units.rank_list(ranks)}"
            _line(console, f"  {difference.what}: {value} on {where}")
    if merged.missing:
        _line(console, f"No report from rank {units.rank_list(merged.missing)}.", "bold red")
        _line(console, f"  {WHY_RANKS_ARE_MISSING}")


def _head(console: Console, report: RunReport) -> None:
    ranks = f"rank {report.rank} of {report.world_size}, " if report.world_size > 1 else ""
    _line(
        console,
        f"dynamo_dist {report.plugin_version or '?'}: {ranks}torch {report.torch_version or '?'}",
        "bold",
    )


def _summary(console: Console, report: RunReport, summary: Summary) -> None:
    breaks = _number(summary.break_places)
    if summary.break_times > summary.break_places:
        breaks += f" (met {_count(summary.break_times, 'time')})"
    kinds = ", ".join(f"{count} {kind}" for kind, count in summary.launches_by_kind)
    launches = _number(summary.launches) + (f" ({kinds})" if kinds else "")
    rows = [
        ("graph breaks", breaks),
        ("graphs", _number(summary.graphs)),
        ("launches", launches),
    ]
    if summary.graphs:
        us, size = _us, units.human_bytes
        s, label = summary, f"simulated on {report.topology}"
        rows += [
            ("exposed", _from_to(s.exposed_before_us, s.exposed_after_us, us, label)),
            ("time", _from_to(s.makespan_before_us, s.makespan_after_us, us, label)),
            ("peak memory", _from_to(s.peak_before_bytes, s.peak_after_bytes, size, label)),
        ]
    for name, value in rows:
        _line(console, f"  {name:<14}{value}")
    if note := ONLY_OBSERVED if is_only_observed(report) else why_no_graph(report):
        _line(console, f"  {note}")


def _from_to(before: float, after: float, human: Callable[[float], str], label: str) -> str:
    if before == after:
        return f"{human(after)} ({label})"
    changed = _ascii(units.change(before, after))
    return (
        f"{human(before)} -> {human(after)}" + (f", {changed}" if changed else "") + f" ({label})"
    )


def _number(value: float) -> str:
    return _ascii(units.human_number(value))


def _count(count: int, noun: str) -> str:
    return _ascii(units.count_of(count, noun))


def _us(us: float) -> str:
    return _ascii(units.human_us(us))


def _ascii(number: str) -> str:
    """Signs that every terminal can show."""
    return number.translate(_SIGNS)


def _break(console: Console, item: BreakRecord) -> None:
    times = f", {_count(item.count, 'time')}" if item.count > 1 else ""
    _line(console, "")
    _line(console, f"BREAK {item.kind} ({_EFFECTS[item.effect]}{times})", "bold red")
    if item.user_line:
        _line(console, f"  {item.user_line}")
    _line(console, f"  why: {item.explanation}")
    if item.fix:
        _line(console, "  fix:")
        for code in item.fix.splitlines():
            _line(console, f"    {code}", "cyan")


def _fact(console: Console, fact: Fact) -> None:
    value = units.fact_text(fact.value, fact.unit)
    if not isinstance(fact.value, str):
        value = _ascii(value)
    if isinstance(fact.value, tuple) and len(fact.value) > 1:
        value += f" over {len(fact.value)} values"
    source = f" ({fact.source})" if fact.source else ""
    _line(console, f"{fact.name}: {value}{source}")


def _plan(console: Console, plan: PlanRecord) -> None:
    _line(console, "")
    _line(
        console,
        f"plan {plan.graph} ({plan.method}): {len(plan.changes)} of {_count(plan.steps, 'step')} changed; "
        f"{_us(plan.stock_us)} -> {_us(plan.planned_us)}, bound {_us(plan.bound_us)}, modelled",
        "bold",
    )
    for step in plan.changes[:_MOST_NOTES]:
        _line(console, f"  {step.op}: {', '.join(step.stock)} -> {', '.join(step.planned)}")
    if len(plan.changes) > _MOST_NOTES:
        _line(console, f"  and {len(plan.changes) - _MOST_NOTES} more", "dim")


def _graph(console: Console, title: str, graph: GraphRecord) -> None:
    nodes = _count(graph.node_count, "node")
    counts = f"{nodes}, {_count(len(graph.collectives), 'collective')}"
    _line(console, "")
    _line(console, f"{title} graph: {counts}; {order_text(graph)}", "bold")
    for text in _passes(graph.passes):
        _line(console, f"  {text}")
    if graph.schedule is not None:
        _line(console, f"  {schedule_text(graph.schedule)}")
    for figure in graph.figures:
        said = units.fact_text(figure.value, figure.unit)
        _line(console, f"  {figure.name}: {_us(figure.value) if figure.unit == 'us' else said}")
    for warning in graph.warnings:
        _line(console, f"  warning: {warning}", "yellow")
    groups = alike(graph.collectives)
    for group in groups[:_MOST_COLLECTIVES]:
        _collectives(console, group)
    if len(groups) > _MOST_COLLECTIVES:
        _line(console, f"  and {len(groups) - _MOST_COLLECTIVES} more kinds", "dim")


def _collectives(console: Console, group: Collectives) -> None:
    """Collectives of one line and kind: what, why there, how long, and why exposed."""
    one = group.first
    times = f"{group.count} x " if group.count > 1 else ""
    each = " each" if group.count > 1 else ""
    _line(
        console,
        f"  {times}{one.kind} {units.human_bytes(one.payload_bytes)} on {one.group_name}, predicted "
        f"{_us(one.predicted_us)}{each}: {_exposure(group)}",
    )
    if one.cause:
        _line(console, f"    {one.cause}", "cyan")
    if one.stack:
        _line(console, f"    {' '.join(units.split_line(one.stack))}")


def _exposure(group: Collectives) -> str:
    before, after = _us(group.exposed_before_us), _us(group.exposed_after_us)
    if after == "0":
        return "hidden" if before == "0" else f"{before} exposed -> hidden"
    why = f" ({WHY_EXPOSED[group.why_exposed]})" if group.why_exposed in WHY_EXPOSED else ""
    return f"{before} exposed{why}" if before == after else f"{before} -> {after} exposed{why}"


def schedule_text(schedule: ScheduleRecord) -> str:
    """Tell what the global scheduler did, and how far from the best it may be."""
    return (
        f"{schedule.decision}; {_us(schedule.makespan_before_us)} -> {_us(schedule.makespan_after_us)}, "
        f"bound {_us(schedule.bound_us)}, gap {100 * schedule.gap:.1f} %, "
        f"{_count(schedule.buckets, 'bucket')}, {schedule.seconds:.2f} s"
    )


def _passes(records: Sequence[PassRecord]) -> list[str]:
    """Tell what passes did, a line each with their decisions; those that did nothing, by reason."""
    lines: list[str] = []
    idle: dict[str, list[str]] = {}
    for record in records:
        if record.status == "ran" and record.changed:
            did = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in record.counters.items())
            lines.append(f"{record.name} ({record.numerics}): {did or 'changed'}")
        elif record.status == "ran":
            idle.setdefault("nothing to do", []).append(record.name)
        else:
            idle.setdefault(f"{record.status}, {record.reason}", []).append(record.name)
        notes = Counter(_NODE.sub("", note) for note in record.notes)
        lines += [
            f"{record.name}: {f'{count} x ' if count > 1 else ''}{note}"
            for note, count in notes.most_common(_MOST_NOTES)
        ]
    return [*lines, *(f"{what}: {', '.join(names)}" for what, names in idle.items())]


def _line(console: Console, text: str, style: str = "") -> None:
    """Text as it is: a user's code is never read as markup, and what cannot be shown is a ``?``."""
    from rich.text import Text

    shown = text.encode(console.encoding, "replace").decode(console.encoding)
    console.print(Text(shown, style=style), soft_wrap=True)
