"""A timeline as boxes on lanes: what of it is exposed, and tiny spans drawn as one.

Pure geometry in microseconds; the template turns it into SVG.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from inductor_passes.records import SpanRecord, TimelineRecord

COMPUTE_LANE = "compute"
# Spans narrower than this part of the picture are drawn together: half a pixel in 1000.
RESOLUTION = 1 / 2000

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """One rectangle; ``style`` is ``compute``, ``wait``, ``hidden`` or ``exposed``.

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
    """``compute`` or a process group; ``busy_us`` without waiting."""

    name: str
    boxes: tuple[Box, ...]
    busy_us: float


@dataclass(frozen=True, slots=True)
class Picture:
    """Lanes of one timeline, compute first; ``scale_us`` is the width of the whole picture."""

    lanes: tuple[Lane, ...]
    scale_us: float


def draw(timeline: TimelineRecord, scale_us: float, lane_names: Sequence[str] = ()) -> Picture:
    """Boxes of ``timeline`` in a picture that is ``scale_us`` wide.

    ``lane_names`` gives lanes to draw, even empty ones, and their order; other lanes follow.
    """
    by_lane: dict[str, list[SpanRecord]] = {name: [] for name in (COMPUTE_LANE, *lane_names)}
    for span in timeline.spans:
        by_lane.setdefault(span.lane, []).append(span)
    busy = _union((s.start_us, _end(s)) for s in by_lane[COMPUTE_LANE] if s.kind != "wait")
    lanes = []
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
    return Picture(tuple(lanes), scale_us)


def ticks(scale_us: float, about: int = 8) -> list[float]:
    """Round times from 0 to ``scale_us``, about ``about`` of them."""
    if scale_us <= 0:
        return [0.0]
    raw = scale_us / about
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
    """Neighbours of one style that are too narrow to be told apart become one box."""
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
