"""Render a report as one HTML file that needs nothing else, with timelines as boxes on lanes.

Pure geometry in microseconds; the template turns it into SVG.

The template escapes whatever it shows; Python makes no markup.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inductor_passes.graph.phases import STAGES
from inductor_passes.records import CollectiveRecord, GraphRecord, SpanRecord, TimelineRecord
from inductor_passes.report import figures
from inductor_passes.report.figures import WHY_EXPOSED, GraphsReport, order_text, titled, totals

if TYPE_CHECKING:
    from jinja2 import Template

COMPUTE_LANE, STAGE_LANE = "compute", "stage"
# Spans narrower than this part of the picture are drawn together: half a pixel in 1000.
RESOLUTION = 1 / 2000

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangle; ``style`` is ``compute``, ``wait``, ``hidden``, ``exposed`` or a stage.

    ``span`` is the longest of the ``count`` spans in it, ``busy_us`` the sum of their durations
    within the box.
    """

    start_us: float
    duration_us: float
    style: str
    span: SpanRecord
    count: int = 1
    busy_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Lane:
    """``stage``, ``compute`` or a process group; ``busy_us`` without waiting."""

    name: str
    boxes: tuple[Box, ...]
    busy_us: float


@dataclass(frozen=True, slots=True)
class Picture:
    """Lanes of one timeline, compute above groups; ``scale_us`` is the width of the whole
    picture. ``memory``: microseconds and bytes where they change.
    """

    lanes: tuple[Lane, ...]
    scale_us: float
    memory: tuple[tuple[float, int], ...] = ()


def draw(timeline: TimelineRecord, scale_us: float, lane_names: Sequence[str] = ()) -> Picture:
    """Boxes of ``timeline`` in a picture that is ``scale_us`` wide.

    ``lane_names`` gives lanes to draw, even empty ones, and their order; other lanes follow. Above
    all, a whole training step has a lane of its stages.
    """
    by_lane: dict[str, list[SpanRecord]] = {name: [] for name in (COMPUTE_LANE, *lane_names)}
    for span in timeline.spans:
        by_lane.setdefault(span.lane, []).append(span)
    busy = _union((s.start_us, _end(s)) for s in by_lane[COMPUTE_LANE] if s.kind != "wait")
    lanes = []
    if stages := _stages(by_lane[COMPUTE_LANE]):
        lanes.append(Lane(STAGE_LANE, stages, sum(box.duration_us for box in stages)))
    for name, spans in by_lane.items():
        if name == COMPUTE_LANE:
            boxes = [
                Box(s.start_us, s.duration_us, "wait" if s.kind == "wait" else "compute", s)
                for s in spans
            ]
        else:
            boxes = [box for span in spans for box in _split(span, busy)]
        lanes.append(
            Lane(
                name=name,
                boxes=tuple(_merge_tiny(boxes, scale_us * RESOLUTION)),
                busy_us=sum(s.duration_us for s in spans if s.kind != "wait"),
            )
        )
    return Picture(tuple(lanes), scale_us, tuple(_thinned(timeline.memory, scale_us * RESOLUTION)))


def _thinned(memory: Iterable[tuple[float, int]], width_us: float) -> Iterator[tuple[float, int]]:
    """Leave the highest of the changes within each ``width_us``, and the last one."""
    for _, run in itertools.groupby(memory, key=lambda at: at[0] // width_us if width_us else 0):
        changes = list(run)
        first, last = changes[0][0], changes[-1]
        highest = max(size for _, size in changes)
        yield first, highest
        if last[1] != highest:
            yield last


def _stages(spans: Sequence[SpanRecord]) -> tuple[Box, ...]:
    """A box for each run of one stage on the compute stream."""
    boxes: list[Box] = []
    for stage, run in itertools.groupby(spans, key=lambda span: span.stage):
        members = list(run)
        start, end = members[0].start_us, _end(members[-1])
        busy = sum(span.duration_us for span in members if span.kind != "wait")
        if stage:
            longest = max(members, key=lambda span: span.duration_us)
            boxes.append(Box(start, end - start, stage, longest, len(members), busy))
    return tuple(boxes)


def ticks(scale_us: float) -> list[float]:
    """Round times from 0 to ``scale_us``, about eight of them."""
    if scale_us <= 0:
        return [0.0]
    raw = scale_us / 8
    power = 10.0 ** math.floor(math.log10(raw))
    step = next((m * power for m in (1, 2, 5) if m * power >= raw), 10 * power)
    return [round(i * step, 6) for i in range(int(scale_us / step) + 1)]


def _end(span: SpanRecord) -> float:
    return span.start_us + span.duration_us


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        # Sums of floats leave gaps that are none.
        if merged and start <= merged[-1][1] + 1e-6:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _split(span: SpanRecord, busy: Sequence[Interval]) -> list[Box]:
    """A collective's span as hidden parts, under compute, and exposed parts."""
    boxes: list[Box] = []
    clock, end = span.start_us, _end(span)
    first = max(0, bisect.bisect_right(busy, (span.start_us, math.inf)) - 1)
    for start, stop in busy[first:]:
        if start >= end:
            break
        if stop <= clock:
            continue
        if start > clock:
            boxes.append(Box(clock, start - clock, "exposed", span))
        low, high = max(start, clock), min(stop, end)
        boxes.append(Box(low, high - low, "hidden", span))
        clock = high
    if end > clock:
        boxes.append(Box(clock, end - clock, "exposed", span))
    tiny = 1e-6
    return [box for box in boxes if box.duration_us > tiny]


def _merge_tiny(boxes: Sequence[Box], width_us: float) -> list[Box]:
    """Merge neighbours of one style into one box if they are too narrow to distinguish."""
    merged: list[Box] = []
    for box in sorted(boxes, key=lambda b: b.start_us):
        last = merged[-1] if merged else None
        new = Box(box.start_us, box.duration_us, box.style, box.span, 1, box.duration_us)
        if (
            last is not None
            and last.style == box.style
            and box.duration_us < width_us
            and (last.count > 1 or last.duration_us < width_us)
            and box.start_us - (last.start_us + last.duration_us) < width_us
            # A run of tiny spans is cut into pieces that a zoom can still show.
            and last.duration_us < 8 * width_us
        ):
            longest = max(last.span, box.span, key=lambda s: s.duration_us)
            end = max(last.start_us + last.duration_us, box.start_us + box.duration_us)
            merged[-1] = Box(
                start_us=last.start_us,
                duration_us=end - last.start_us,
                style=last.style,
                span=longest,
                count=last.count + 1,
                busy_us=last.busy_us + box.duration_us,
            )
        else:
            merged.append(new)
    return merged


LANE_HEIGHT = 24
LANE_GAP = 5
MEMORY_HEIGHT = 48
# A label is drawn without JavaScript where it fits a picture of this many pixels.
_ASSUMED_PX = 1000
_PX_PER_CHAR = 7.2


@dataclass(frozen=True, slots=True)
class _Label:
    text: str
    style: str
    at_percent: float
    y: float


@dataclass(frozen=True, slots=True)
class _GraphView:
    """One graph, ready to be laid out. ``height`` is of the lanes, in pixels; ``memory_y`` of those
    above that of memory, whose height stands for ``most_bytes``.
    """

    title: str
    record: GraphRecord
    before: Picture
    after: Picture
    lane_titles: dict[str, str]
    collectives: dict[str, CollectiveRecord]
    ticks: list[float]
    height: int
    memory_y: int
    most_bytes: int
    open: bool


def page(
    run: GraphsReport, template: str = "graphs.html.j2", folder: str = __package__, **more: Any
) -> str:
    """The whole page, by a template in ``folder``, a package with templates, which gets ``more``
    besides.
    """
    return _template(template, folder).render(
        name=folder.partition(".")[0],
        run=run,
        summary=totals(run.graphs),
        graphs=_views(run.graphs),
        **more,
    )


def _views(graphs: Sequence[GraphRecord]) -> list[_GraphView]:
    # With many graphs the page opens where there is most to see.
    ranked = sorted(range(len(graphs)), key=lambda i: -graphs[i].before.makespan_us)
    shown = set(ranked[:3])
    return [_view(*each, i in shown) for i, each in enumerate(titled(graphs))]


def _view(title: str, graph: GraphRecord, is_open: bool) -> _GraphView:
    drawn = [graph.before, graph.after]
    scale = max(timeline.makespan_us for timeline in drawn)
    spans = [span for timeline in drawn for span in timeline.spans]
    groups = tuple(dict.fromkeys(s.lane for s in spans if s.lane != COMPUTE_LANE))
    sizes = {c.group_name: c.group_size for c in graph.collectives}
    lane_titles = {STAGE_LANE: "stage"} if graph.is_whole_step else {}
    lane_titles[COMPUTE_LANE] = "compute"
    for group in groups:
        size = sizes.get(group)
        lane_titles[group] = f"group {group}" + (f" · {size} ranks" if size else "")
    most_bytes = max(size for timeline in drawn for _, size in (*timeline.memory, (0, 0)))
    memory_y = len(lane_titles) * (LANE_HEIGHT + LANE_GAP)
    return _GraphView(
        title=title,
        record=graph,
        before=draw(graph.before, scale, groups),
        after=draw(graph.after, scale, groups),
        lane_titles=lane_titles,
        collectives={c.name: c for c in graph.collectives},
        ticks=ticks(scale),
        height=memory_y + (MEMORY_HEIGHT if most_bytes else -LANE_GAP),
        memory_y=memory_y,
        most_bytes=most_bytes,
        open=is_open,
    )


def _box_title(box: Box, collectives: dict[str, CollectiveRecord]) -> str:
    """Return the text shown when hovering over a box; its first line is the label if it fits."""
    collective = collectives.get(box.span.name)
    if box.style in STAGES:
        head, more = box.style, [f"compute is busy for {figures.human_us(box.busy_us)}"]
    elif box.count > 1:
        head = f"{box.count} spans"
        more = [f"longest: {box.span.name}", f"busy {figures.human_us(box.busy_us)}"]
    elif box.style == "wait":
        head = "wait"
        more = [f"compute stands still for {box.span.name}"]
    elif box.span.lane == COMPUTE_LANE:
        head, more = box.span.name, []
    else:
        head, more = box.span.kind, [box.span.name]
        if collective is not None:
            head += f" {figures.human_bytes(collective.payload_bytes)}"
            more.append(f"{collective.dtype}, {figures.human_us(box.span.duration_us)} on the link")
            if collective.stack:
                more.append(" ".join(figures.split_line(collective.stack)))
    start, end = box.start_us, box.start_us + box.duration_us
    times = f"{figures.human_us(start)} to {figures.human_us(end)}: {figures.human_us(end - start)}"
    if box.style in ("hidden", "exposed"):
        times += f" {box.style}"
    return "\n".join([head, *more, times])


def _labels(picture: Picture, collectives: dict[str, CollectiveRecord]) -> list[_Label]:
    """Labels of boxes that are wide enough, for readers without JavaScript."""
    labels = []
    for row, lane in enumerate(picture.lanes):
        for box in lane.boxes:
            text = _box_title(box, collectives).split("\n", 1)[0]
            px = box.duration_us / picture.scale_us * _ASSUMED_PX if picture.scale_us else 0
            if len(text) * _PX_PER_CHAR + 8 <= px:
                middle = (box.start_us + box.duration_us / 2) / picture.scale_us * 100
                y = row * (LANE_HEIGHT + LANE_GAP) + LANE_HEIGHT / 2
                labels.append(_Label(text, box.style, round(middle, 3), y))
    return labels


def _lane_y(picture: Picture, lane: Lane) -> int:
    return picture.lanes.index(lane) * (LANE_HEIGHT + LANE_GAP)


def _memory_points(view: _GraphView, picture: Picture) -> str:
    """Return the corners of the area under a memory curve, for SVG."""
    bottom = view.memory_y + MEMORY_HEIGHT
    corners: list[tuple[float, float]] = [(0.0, bottom)]
    for at_us, size in picture.memory:
        y = bottom - MEMORY_HEIGHT * size / view.most_bytes
        corners += [(at_us, corners[-1][1]), (at_us, y)]
    corners.append((corners[-1][0], bottom))
    return " ".join(f"{x:.3f},{y:.2f}" for x, y in corners)


def _share(part: float, whole: float) -> float:
    """Percent of ``whole``, for the width of a bar."""
    return round(100 * part / whole, 2) if whole > 0 else 0.0


@functools.cache
def _template(name: str, folder: str) -> Template:
    import jinja2  # slow to import, and only HTML needs it

    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(p) for p in (folder, __package__)]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    filters: dict[str, Any] = {
        "bytes": figures.human_bytes,
        "us": figures.human_us,
        "number": figures.human_number,
        "fact": figures.fact_text,
        "order_text": order_text,
    }
    environment.filters.update(filters)
    environment.globals.update(
        change=figures.change,
        count_of=figures.count_of,
        split_line=figures.split_line,
        share=_share,
        box_title=_box_title,
        labels=_labels,
        lane_y=_lane_y,
        memory_points=_memory_points,
        MEMORY_HEIGHT=MEMORY_HEIGHT,
        why_exposed=WHY_EXPOSED,
        human_us=figures.human_us,
        human_bytes=figures.human_bytes,
        LANE_HEIGHT=LANE_HEIGHT,
    )
    return environment.get_template(name)
