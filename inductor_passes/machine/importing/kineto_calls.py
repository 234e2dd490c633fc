"""A profile of torch.profiler -> what each marked call of generated code ran on the device, in the order in which the host started it.

On a device kernels run on when their launch returns, and those of several streams beside each other: what tells the order of the
code is when the host started them, which the profile joins to the kernel by ``correlation``. Calls, and the events of the code inside of
them, are ranges that ``attach/marks.py`` sets on the thread that runs the code: what was started in a range is that event's.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from inductor_passes.files import checked
from inductor_passes.machine.importing.kineto import COLLECTIVES, PRODUCTS, PROFILE, Event

# Names of ranges, before the number of the graph and of the event.
CALL, EVENT = "inductor_passes call ", "inductor_passes event "
_STARTS = ("cuda_runtime", "cuda_driver")
# What runs on a device, by category of the profile.
_RUNS = ("kernel", "gpu_memcpy", "gpu_memset")
_NAME = {"anyOf": [{"type": kind} for kind in ("integer", "string", "number", "null")]}
_TIMED = dataclasses.replace(
    PROFILE,
    schema={
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "ts": {"type": "number"},
            "dur": {"type": "number", "minimum": 0},
            "args": {
                "type": "object",
                "properties": {"External id": _NAME, "correlation": _NAME, "stream": _NAME},
            },
        },
        "required": ["name", "ts", "dur"],
    },
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel, copy or fill on the device; several of one matrix product are one.

    ``begin``, ``end``: seconds at which it ran; ``started``: at which the host started it, on the same clock. ``us``: how long it ran.
    ``at``: the event that started it, by index, or, if not ``inside`` of one, the event that came next. ``collective``: its kind, where the
    profile says so. ``is_nccl``: by its name. ``product``: whether it is one of a matrix product.
    """

    name: str
    begin: float
    end: float
    started: float
    us: float
    stream: object
    at: int
    inside: bool
    collective: str = ""
    is_nccl: bool = False
    product: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the graph that was marked with number ``graph``. ``events``: how many ranges of events it has."""

    graph: int
    events: int
    kernels: tuple[Kernel, ...]


def calls(trace: Any, file: str) -> list[Call]:
    """Read the marked calls of a profile, in order. Raises TopologyError if it is none."""
    checked(trace, PROFILE, file)
    runs: dict[object, Event] = {}
    starts: list[Event] = []
    marks: list[Event] = []
    events: list[Event] = []
    products: set[object] = set()
    for at, event in enumerate(trace["traceEvents"]):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        what, name = event.get("cat"), str(event.get("name", ""))
        if what in _RUNS or what in _STARTS:
            checked(event, _TIMED, file, ("traceEvents", at))
            number = event.get("args", {}).get("correlation")
            if what in _RUNS:
                runs[number] = event
            elif number is not None:
                starts.append(event)
        elif what == "user_annotation" and name.startswith((CALL, EVENT)):
            checked(event, _TIMED, file, ("traceEvents", at))
            (marks if name.startswith(CALL) else events).append(event)
        elif what == "cpu_op" and name in PRODUCTS:
            products.add(event.get("args", {}).get("External id"))
    starts.sort(key=_ts)
    events.sort(key=_ts)
    found = []
    for mark in sorted(marks, key=_ts):
        ranges = [event for event in _inside(events, mark) if _number(event) is not None]
        started = [
            (start, run)
            for start in _inside(starts, mark)
            if (run := runs.get(start["args"]["correlation"])) is not None
        ]
        graph = _number(mark)
        if graph is not None:
            found.append(Call(graph, len(ranges), tuple(_read(started, ranges, products))))
    return found


def _ts(event: Event) -> float:
    return float(event["ts"])


def _number(event: Event) -> int | None:
    word = event["name"].rpartition(" ")[2]
    return int(word) if word.isdecimal() and word.isascii() else None


def _inside(events: Sequence[Event], mark: Event) -> list[Event]:
    """Events, in order of time, that begin within a range of the same thread."""
    first = bisect.bisect_left(events, _ts(mark), key=_ts)
    last = bisect.bisect_right(events, _ts(mark) + mark["dur"], key=_ts)
    return [event for event in events[first:last] if event.get("tid") == mark.get("tid")]


def _read(
    started: Sequence[tuple[Event, Event]], ranges: Sequence[Event], products: set[object]
) -> Iterator[Kernel]:
    before: object = None
    held: Kernel | None = None
    for start, run in started:
        of = run.get("args", {}).get("External id")
        made = _kernel(start, run, ranges, is_product=of is not None and of in products)
        if held is not None and held.product and made.product and of is not None and of == before:
            held = dataclasses.replace(held, us=held.us + made.us, end=max(held.end, made.end))
            continue
        if held is not None:
            yield held
        held, before = made, of
    if held is not None:
        yield held


def _kernel(start: Event, run: Event, ranges: Sequence[Event], *, is_product: bool) -> Kernel:
    args, name = run.get("args", {}), run["name"]
    kind = COLLECTIVES.get(str(args.get("Collective name", "")), "")
    is_nccl = bool(kind) or name.lower().startswith("nccl")
    # The last range that has begun.
    number = bisect.bisect_right(ranges, _ts(start), key=_ts) - 1
    inside = number >= 0 and _ts(start) <= _ts(ranges[number]) + ranges[number]["dur"]
    return Kernel(
        name,
        run["ts"] / 1e6,
        (run["ts"] + run["dur"]) / 1e6,
        start["ts"] / 1e6,
        float(run["dur"]),
        args.get("stream"),
        number if inside else number + 1,
        inside,
        kind,
        is_nccl,
        not is_nccl and (is_product or name.startswith("triton_tem_")),
    )
