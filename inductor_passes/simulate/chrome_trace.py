"""Timelines as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

Format: "Trace Event Format",
docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from inductor_passes.files import JsonObject
from inductor_passes.records import SpanRecord, TimelineRecord

_COMPUTE_LANE = "compute"


def chrome_trace(timelines: Mapping[str, TimelineRecord], *, rank: int = 0) -> JsonObject:
    """One process per timeline, one thread per lane, one complete event per span, a counter of
    memory.

    ``timelines`` maps a title ("forward before", "forward after") to its record. Times are
    microseconds, as the format wants them. An arrow leads from each collective to the wait that it
    held up.
    """
    events: list[JsonObject] = []
    for pid, (title, timeline) in enumerate(timelines.items()):
        lanes = _lanes(timeline)
        events.append(
            _metadata("process_name", pid, 0, {"name": f"{title} (simulated, rank {rank})"})
        )
        events.append(_metadata("process_sort_index", pid, 0, {"sort_index": pid}))
        for lane, tid in lanes.items():
            name = lane if lane == _COMPUTE_LANE else f"group {lane}"
            events.append(_metadata("thread_name", pid, tid, {"name": name}))
            events.append(_metadata("thread_sort_index", pid, tid, {"sort_index": tid}))
        events.extend(_span(span, pid, lanes[span.lane]) for span in timeline.spans)
        events.extend(
            {"ph": "C", "name": "memory", "pid": pid, "ts": at, "args": {"bytes": size}}
            for at, size in timeline.memory
        )
        events.extend(_arrows(timeline, pid, lanes, first_id=len(events)))
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "rank": rank,
            "timelines": {
                title: {
                    "makespan_us": timeline.makespan_us,
                    "compute_us": timeline.compute_us,
                    "communication_us": timeline.communication_us,
                    "exposed_us": timeline.exposed_us,
                    "peak_bytes": timeline.peak_bytes,
                }
                for title, timeline in timelines.items()
            },
        },
    }


def joined_traces(traces: Sequence[JsonObject]) -> JsonObject:
    """Traces of several ranks as one: each keeps its processes and arrows apart from the
    others'.
    """
    events: list[JsonObject] = []
    processes = arrows = 0
    for trace in traces:
        for event in trace["traceEvents"]:
            event = {**event, "pid": event["pid"] + processes}
            if "id" in event:
                event["id"] += arrows
            if event["name"] == "process_sort_index":
                event["args"] = {"sort_index": event["pid"]}
            events.append(event)
        processes = 1 + max((event["pid"] for event in events), default=-1)
        arrows = 1 + max((event["id"] for event in events if "id" in event), default=-1)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"ranks": [trace["otherData"] for trace in traces]},
    }


def _lanes(timeline: TimelineRecord) -> dict[str, int]:
    """Thread ids: compute first, then groups as they appear."""
    lanes = {_COMPUTE_LANE: 0}
    for span in timeline.spans:
        lanes.setdefault(span.lane, len(lanes))
    return lanes


def _metadata(name: str, pid: int, tid: int, args: JsonObject) -> JsonObject:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _span(span: SpanRecord, pid: int, tid: int) -> JsonObject:
    event: JsonObject = {
        "ph": "X",
        "name": span.name,
        "cat": span.kind,
        "pid": pid,
        "tid": tid,
        "ts": span.start_us,
        "dur": span.duration_us,
    }
    notes = {"why exposed": span.why_exposed, "stage": span.stage}
    if notes := {name: text for name, text in notes.items() if text}:
        event["args"] = notes
    return event


def _arrows(
    timeline: TimelineRecord, pid: int, lanes: Mapping[str, int], first_id: int
) -> list[JsonObject]:
    """A wait ends at the very moment at which the collective that it waited for ends."""
    ends = {_end(span): span for span in timeline.spans if span.lane != _COMPUTE_LANE}
    arrows: list[JsonObject] = []
    for span in timeline.spans:
        source = ends.get(_end(span))
        if span.kind != "wait" or source is None:
            continue
        common = {"name": source.name, "cat": "wait", "id": first_id + len(arrows), "pid": pid}
        arrows.append({**common, "ph": "s", "tid": lanes[source.lane], "ts": source.start_us})
        arrows.append({**common, "ph": "f", "bp": "e", "tid": lanes[span.lane], "ts": _end(span)})
    return arrows


def _end(span: SpanRecord) -> float:
    """End of a span to the nanosecond: sums of floats differ beyond that."""
    return round(span.start_us + span.duration_us, 3)
