"""Render a report for the terminal."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from inductor_passes.records import GraphRecord, PassRecord, ScheduleRecord
from inductor_passes.report import figures
from inductor_passes.report.figures import (
    WHY_EXPOSED,
    Collectives,
    GraphsReport,
    alike,
    order_text,
    titled,
    totals,
)

if TYPE_CHECKING:
    from rich.console import Console

_SIGNS = {
    ord("\N{MICRO SIGN}"): "u",
    ord("\N{MINUS SIGN}"): "-",
    ord("\N{NARROW NO-BREAK SPACE}"): " ",
    ord("\N{RIGHTWARDS ARROW}"): "->",
}
# More would not help on a terminal; the page has them all.
_MOST_COLLECTIVES = 20
MOST_NOTES = 10
# A node's name in a note: without it alike decisions are one.
_NODE = re.compile(r" %\w+")


def print_graphs(
    report: GraphsReport,
    console: Console | None = None,
    *,
    name: str = "inductor_passes",
    rows: Sequence[tuple[str, str]] = (),
    between: Callable[[Console], object] = lambda console: None,
) -> None:
    """Print to ``console``, by default standard output; colour where the terminal has it.

    ``rows`` stand above the totals of graphs; ``between`` prints what comes between totals and
    graphs.
    """
    console = console or terminal()
    ranks = f"rank {report.rank} of {report.world_size}, " if report.world_size > 1 else ""
    versions = f"{report.plugin_version or '?'}: {ranks}torch {report.torch_version or '?'}"
    line(console, f"{name} {versions}", "bold")
    for what, value in (*rows, *_totals(report)):
        line(console, f"  {what:<14}{value}")
    between(console)
    for title, graph in titled(report.graphs):
        _graph(console, title, graph)


def terminal() -> Console:
    """Return standard output as a console."""
    from rich.console import Console  # slow to import, and only text needs it

    return Console(highlight=False, soft_wrap=False)


def _totals(report: GraphsReport) -> list[tuple[str, str]]:
    s = totals(report.graphs)
    kinds = ", ".join(f"{count} {kind}" for kind, count in s.launches_by_kind)
    rows = [
        ("graphs", number(s.graphs)),
        ("launches", number(s.launches) + (f" ({kinds})" if kinds else "")),
    ]
    if s.graphs:
        label = f"simulated on {report.topology}"
        size = figures.human_bytes
        rows += [
            ("exposed", _from_to(s.exposed_before_us, s.exposed_after_us, us_text, label)),
            ("time", _from_to(s.makespan_before_us, s.makespan_after_us, us_text, label)),
            ("peak memory", _from_to(s.peak_before_bytes, s.peak_after_bytes, size, label)),
        ]
    return rows


def _from_to(before: float, after: float, human: Callable[[float], str], label: str) -> str:
    if before == after:
        return f"{human(after)} ({label})"
    changed = ascii_only(figures.change(before, after))
    return (
        f"{human(before)} -> {human(after)}" + (f", {changed}" if changed else "") + f" ({label})"
    )


def number(value: float) -> str:
    """Write a number in signs that every terminal can show; so do the next two."""
    return ascii_only(figures.human_number(value))


def counted(count: int, noun: str) -> str:
    """Write ``1 graph``, ``2 graphs``."""
    return ascii_only(figures.count_of(count, noun))


def us_text(us: float) -> str:
    """Write microseconds."""
    return ascii_only(figures.human_us(us))


def ascii_only(number: str) -> str:
    """Write signs that every terminal can show."""
    return number.translate(_SIGNS)


def _graph(console: Console, title: str, graph: GraphRecord) -> None:
    nodes = counted(graph.node_count, "node")
    counts = f"{nodes}, {counted(len(graph.collectives), 'collective')}"
    line(console, "")
    line(console, f"{title} graph: {counts}; {order_text(graph)}", "bold")
    if graph.cache is not None:
        line(console, f"  cache {graph.cache}")
    for text in _passes(graph.passes):
        line(console, f"  {text}")
    if graph.schedule is not None:
        line(console, f"  {schedule_text(graph.schedule)}")
    for figure in graph.figures:
        said = figures.fact_text(figure.value, figure.unit)
        line(console, f"  {figure.name}: {us_text(figure.value) if figure.unit == 'us' else said}")
    for warning in graph.warnings:
        line(console, f"  warning: {warning}", "yellow")
    groups = alike(graph.collectives)
    for group in groups[:_MOST_COLLECTIVES]:
        _collectives(console, group)
    if len(groups) > _MOST_COLLECTIVES:
        line(console, f"  and {len(groups) - _MOST_COLLECTIVES} more kinds", "dim")


def _collectives(console: Console, group: Collectives) -> None:
    """Collectives of one line and kind: what, why there, how long, and why exposed."""
    one = group.first
    times = f"{group.count} x " if group.count > 1 else ""
    each = " each" if group.count > 1 else ""
    line(
        console,
        f"  {times}{one.kind} {figures.human_bytes(one.payload_bytes)} on {one.group_name}, "
        f"predicted {us_text(one.predicted_us)}{each}: {_exposure(group)}",
    )
    if one.cause:
        line(console, f"    {one.cause}", "cyan")
    if one.stack:
        line(console, f"    {' '.join(figures.split_line(one.stack))}")


def _exposure(group: Collectives) -> str:
    before, after = us_text(group.exposed_before_us), us_text(group.exposed_after_us)
    if after == "0":
        return "hidden" if before == "0" else f"{before} exposed -> hidden"
    why = f" ({WHY_EXPOSED[group.why_exposed]})" if group.why_exposed in WHY_EXPOSED else ""
    return f"{before} exposed{why}" if before == after else f"{before} -> {after} exposed{why}"


def schedule_text(schedule: ScheduleRecord) -> str:
    """Tell what the global scheduler did, and how far from the best it may be."""
    return (
        f"{schedule.decision}; {us_text(schedule.makespan_before_us)} -> "
        f"{us_text(schedule.makespan_after_us)}, "
        f"bound {us_text(schedule.bound_us)}, gap {100 * schedule.gap:.1f} %, "
        f"{counted(schedule.buckets, 'bucket')}, {schedule.seconds:.2f} s"
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
            for note, count in notes.most_common(MOST_NOTES)
        ]
    return [*lines, *(f"{what}: {', '.join(names)}" for what, names in idle.items())]


def line(console: Console, text: str, style: str = "") -> None:
    """Text as it is: a user's code is never read as markup, and what cannot be shown is a ``?``."""
    from rich.text import Text  # slow to import, and only text needs it

    shown = text.encode(console.encoding, "replace").decode(console.encoding)
    console.print(Text(shown, style=style), soft_wrap=True)
