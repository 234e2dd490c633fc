"""Figures and sentences that every report shows, and numbers as people read them.

A function takes what was planned for the graph and returns a number, or None where it says nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.graph.phases import STAGES
from inductor_passes.records import CollectiveRecord, FigureRecord, GraphRecord
from inductor_passes.simulate import Timeline
from inductor_passes.simulate.timeline import COMPUTE_LANE

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_MINUS = "\N{MINUS SIGN}"
_LINE = re.compile(r"^(?P<file>.*?):(?P<line>\d+)(?:: ?(?P<code>.*))?$", re.DOTALL)


def human_bytes(count: float) -> str:
    """``512 B``, ``1.5 KiB``, ``32 MiB``: powers of 1024, three digits."""
    value, unit = float(count), 0
    while abs(value) >= 1024 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    return f"{_three_digits(value)} {_BINARY[unit]}"


def human_us(us: float) -> str:
    """Microseconds as ``740 ns``, ``12.5 µs``, ``1.23 ms`` or ``4.56 s``, three digits; 0 as
    ``0``.
    """
    size = abs(us)
    if size < 5e-4:
        return "0"
    for limit, factor, unit in ((1, 1e3, "ns"), (1e3, 1, "µs"), (1e6, 1e-3, "ms")):
        if size < limit:
            return f"{_three_digits(us * factor)} {unit}"
    return f"{_three_digits(us * 1e-6)} s"


def human_number(value: float) -> str:
    """Up to four significant digits, integers whole; thousands separated by thin spaces."""
    if value != value or value in (float("inf"), float("-inf")):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}".replace(",", "\u202f")
    return f"{value:.4g}"


def fact_text(value: float | str | tuple[float, ...], unit: str = "") -> str:
    """A measured value with its unit; of several the first and the last."""
    if isinstance(value, str):
        return f"{value} {unit}".rstrip()
    values = value if isinstance(value, tuple) else (value,)
    ends = values[:1] + values[-1:] if len(values) > 1 else values
    if unit == "us":
        return " → ".join(map(human_us, ends)) or "none"
    if unit == "bytes":
        return " → ".join(map(human_bytes, ends)) or "none"
    return f"{' → '.join(map(human_number, ends)) or 'none'} {unit}".rstrip()


def change(before: float, after: float) -> str:
    """The change in percent, as ``+4 %`` or ``same``; "" where there is no base to compare with."""
    if before <= 0:
        return "" if after <= 0 else "new"
    share = (after - before) / before
    if abs(share) < 0.0005:
        return "same"
    percent = f"{abs(share) * 100:.1f}" if abs(share) < 0.1 else f"{abs(share) * 100:.0f}"
    return f"{'+' if share > 0 else _MINUS}{percent} %"


def count_of(count: int, noun: str, plural: str = "") -> str:
    """``1 graph``, ``2 graphs``."""
    word = noun if count == 1 else plural or noun + "s"
    return f"{human_number(count)} {word}"


def rank_list(ranks: Sequence[int]) -> str:
    """Sorted ranks as ``0-3, 6``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def split_line(user_line: str) -> tuple[str, str]:
    """``folder/file.py:12: code`` as (``file.py:12``, ``code``); what has another form goes
    first.
    """
    match = _LINE.match(user_line)
    if match is None:
        return user_line, ""
    name = re.split(r"[\\/]", match["file"])[-1]
    return f"{name}:{match['line']}", (match["code"] or "").strip()


def _three_digits(value: float) -> str:
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f}"


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """A graph after its passes, its costs, and its predicted timelines before and after them."""

    graph: fx.Graph
    cost: CostModel
    before: Timeline
    after: Timeline


Compute = Callable[[PlannedGraph], float | None]
_figures: dict[str, tuple[str, Compute]] = {}


def figure(name: str, unit: str) -> Callable[[Compute], Compute]:
    """Have reports show what the decorated function returns. ``unit``: ``us``, ``bytes``, or a
    word of its own.
    """

    def register(compute: Compute) -> Compute:
        _figures[name] = (unit, compute)
        return compute

    return register


def figures_of(planned: PlannedGraph) -> tuple[FigureRecord, ...]:
    """Every figure that has something to say of the graph, in the order in which they stand
    here.
    """
    found = ((name, unit, compute(planned)) for name, (unit, compute) in _figures.items())
    return tuple(
        FigureRecord(name, float(value), unit) for name, unit, value in found if value is not None
    )


@figure("busiest group's link", "us")
def busiest_link(planned: PlannedGraph) -> float | None:
    """Time that the launches of one process group take one after another: no order of them is
    shorter.
    """
    lanes: dict[str, float] = defaultdict(float)
    for span in planned.after.spans:
        if span.lane != COMPUTE_LANE:
            lanes[span.lane] += span.duration_us
    return max(lanes.values(), default=None)


def _stage_us(stage: str, planned: PlannedGraph) -> float | None:
    spans = [s for s in planned.after.spans if s.lane == COMPUTE_LANE and s.stage == stage]
    return sum(span.duration_us for span in spans) if spans else None


for _stage in STAGES:
    figure(_stage, "us")(functools.partial(_stage_us, _stage))


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
    """Graphs with titles: ``forward``, or ``forward 1``, ``forward 2`` where a phase has
    several.
    """
    titles = ["training step" if graph.is_whole_step else graph.phase for graph in graphs]
    total, seen = Counter(titles), Counter[str]()
    found = []
    for title, graph in zip(titles, graphs, strict=True):
        seen[title] += 1
        found.append((f"{title} {seen[title]}" if total[title] > 1 else title, graph))
    return found


def order_text(graph: GraphRecord) -> str:
    """Say whether the generated code keeps the order that the passes chose."""
    if graph.order_kept is None:
        return "generated code not looked at"
    if graph.order_kept:
        return "order kept in the generated code"
    return "order NOT kept in the generated code: what runs differs from the timeline below"


SCHEMA_VERSION = 1
MOST_RANKS = 2**20  # the ranks that gave no report are listed one by one


@dataclass(frozen=True, slots=True)
class GraphsReport:
    """One rank's graphs, and who compiled them. Who knows more of a run derives from it."""

    rank: int = field(default=0, metadata={"minimum": 0, "maximum": MOST_RANKS})
    world_size: int = field(default=1, metadata={"minimum": 1, "maximum": MOST_RANKS})
    torch_version: str = ""
    plugin_version: str = ""
    topology: str = ""
    graphs: tuple[GraphRecord, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, with the schema's version."""
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {
            "schema": SCHEMA_VERSION,
            **{name: _plain(value) for name, value in values},
        }


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, GraphRecord):
        return value.to_json()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value
