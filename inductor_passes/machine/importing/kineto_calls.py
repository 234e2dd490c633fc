"""A profile of torch.profiler -> the kernels of each call of a compiled graph, in the order in which its code started them.

On a device kernels run on when their launch returns, and those of several streams beside each other: what tells the order of the
code is when the host started them, which the profile joins to the kernel by ``correlation``. A call is what lies inside of the
mark that Inductor sets around one, on its thread.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from inductor_passes.files import checked
from inductor_passes.machine.importing.kineto import COLLECTIVES, PRODUCTS, PROFILE, Event

# In torch 2.13 an operator of the CPU (seen in a profile of it); where marks are the user's own, an annotation.
MARK = "## Call CompiledFxGraph"
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
                "properties": {"External id": _NAME, "correlation": _NAME},
            },
        },
        "required": ["name", "ts", "dur"],
    },
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel. ``collective``: its kind, "" for one that computes. ``product``: whether it is one of a matrix product."""

    name: str
    us: float
    collective: str = ""
    product: bool = False


Call = tuple[Kernel, ...]


def calls(trace: Any, file: str) -> list[Call]:
    """Read a profile; calls in order. Several kernels of one product are one. Raises TopologyError if it is none."""
    checked(trace, PROFILE, file)
    kernels: dict[object, Event] = {}
    starts: list[Event] = []
    marks: list[Event] = []
    products: set[object] = set()
    for at, event in enumerate(trace["traceEvents"]):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        what = event.get("cat")
        if what == "kernel" or what in ("cuda_runtime", "cuda_driver"):
            checked(event, _TIMED, file, ("traceEvents", at))
            number = event.get("args", {}).get("correlation")
            if what == "kernel":
                kernels[number] = event
            elif number is not None:
                starts.append(event)
        elif str(event.get("name", "")).startswith(MARK) and what in ("cpu_op", "user_annotation"):
            marks.append(checked(event, _TIMED, file, ("traceEvents", at)))
        elif event.get("name") in PRODUCTS and what == "cpu_op":
            products.add(event.get("args", {}).get("External id"))
    starts.sort(key=lambda event: event["ts"])
    times = [event["ts"] for event in starts]
    found = []
    for mark in sorted(marks, key=lambda event: event["ts"]):
        first = bisect.bisect_left(times, mark["ts"])
        last = bisect.bisect_right(times, mark["ts"] + mark["dur"])
        here = [s for s in starts[first:last] if s.get("tid") == mark.get("tid")]
        started = [k for s in here if (k := kernels.get(s["args"]["correlation"])) is not None]
        found.append(tuple(_read(started, products)))
    return found


def _read(events: list[Event], products: set[object]) -> Iterator[Kernel]:
    before: object = None
    held: Kernel | None = None
    for event in events:
        args = event.get("args", {})
        of = args.get("External id")
        kind = COLLECTIVES.get(str(args.get("Collective name", "")), "")
        product = not kind and (
            (of is not None and of in products) or event["name"].startswith("triton_tem_")
        )
        made = Kernel(event["name"], float(event["dur"]), kind, product)
        if held is not None and held.product and product and of is not None and of == before:
            held = dataclasses.replace(held, us=held.us + made.us)
            continue
        if held is not None:
            yield held
        held, before = made, of
    if held is not None:
        yield held
