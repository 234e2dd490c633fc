"""Graphs as one HTML file that needs nothing else: no network, no other file, dark and light.

The template escapes whatever it shows; Python makes no markup.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inductor_passes.records import CollectiveRecord, GraphRecord
from inductor_passes.report import figures
from inductor_passes.report.figures import WHY_EXPOSED, GraphsReport, order_text, titled, totals
from inductor_passes.report.timeline_picture import COMPUTE_LANE, Box, Lane, Picture, draw, ticks

if TYPE_CHECKING:
    from jinja2 import Template

LANE_HEIGHT = 24
LANE_GAP = 5
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
    """One graph, ready to be laid out. ``height`` is of the lanes, in pixels."""

    title: str
    record: GraphRecord
    before: Picture
    after: Picture
    lane_titles: dict[str, str]
    collectives: dict[str, CollectiveRecord]
    ticks: list[float]
    height: int
    open: bool


def page(
    run: GraphsReport, template: str = "graphs.html.j2", folder: str = __package__, **more: Any
) -> str:
    """The whole page, by a template in ``folder``, a package with templates, which gets ``more`` besides."""
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
    lane_titles = {COMPUTE_LANE: "compute"}
    for group in groups:
        size = sizes.get(group)
        lane_titles[group] = f"group {group}" + (f" · {size} ranks" if size else "")
    return _GraphView(
        title=title,
        record=graph,
        before=draw(graph.before, scale, groups),
        after=draw(graph.after, scale, groups),
        lane_titles=lane_titles,
        collectives={c.name: c for c in graph.collectives},
        ticks=ticks(scale),
        height=len(lane_titles) * (LANE_HEIGHT + LANE_GAP) - LANE_GAP,
        open=is_open,
    )


def _box_title(box: Box, collectives: dict[str, CollectiveRecord]) -> str:
    """Return the text shown when hovering over a box; its first line is the label where there is room."""
    collective = collectives.get(box.span.name)
    if box.count > 1:
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


def _share(part: float, whole: float) -> float:
    """Percent of ``whole``, for the width of a bar."""
    return round(100 * part / whole, 2) if whole > 0 else 0.0


@functools.cache
def _template(name: str, folder: str) -> Template:
    import jinja2

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
        why_exposed=WHY_EXPOSED,
        human_us=figures.human_us,
        human_bytes=figures.human_bytes,
        LANE_HEIGHT=LANE_HEIGHT,
    )
    return environment.get_template(name)
