"""A profile of torch.profiler (Kineto's Chrome trace) -> measurements.

Collectives are NCCL's kernels, whose metadata name group, dtype and elements; or gloo's spans, from when one of its threads
begins until it has the result, in a job of one group: they do not name theirs. Products are kernels that
``aten::mm`` and its kin started, if the profile recorded shapes; where no kernel runs on a device at all, the
operators themselves, timed on the CPU. Of equal ones the shortest counts: an NCCL kernel lasts longer where it
waits for a rank that is late, and no run is shorter than the work.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from inductor_passes.cost.collectives import shape_of_ranks
from inductor_passes.cost.measurements import GroupKey, Measurements
from inductor_passes.cost.topology import Product
from inductor_passes.errors import TopologyError
from inductor_passes.files import MIB, MOST, Form, checked

# Names that ProcessGroupNCCL gives (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp) -> ours.
COLLECTIVES = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "allgather": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
BYTES = {
    "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1, "Half": 2, "BFloat16": 2, "Short": 2,
    "Float": 4, "Int": 4, "Double": 8, "Long": 8, "ComplexFloat": 8, "ComplexDouble": 16,
}  # fmt: skip
# Where the two matrices stand among the inputs.
PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
DTYPES = {
    "float": "float32",
    "double": "float64",
    "c10::BFloat16": "bfloat16",
    "c10::Half": "float16",
    "signed char": "int8",
}
BYTES_OF_TYPES = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "signed char": 1,
    "long": 8,
    "int": 4,
}
Event = dict[str, Any]

_MOST_RANKS = 2**18
_NUMBER = re.compile(r"-?[0-9]{1,15}")
_COUNT = {"type": "integer", "minimum": 0}
_COUNTS = {"type": ["string", "array", "null"], "items": _COUNT}
_GROUP = {"type": "object", "properties": {"ranks": _COUNTS}}
PROFILE = Form(
    name="profile",
    error=TopologyError,
    fix="torch.profiler's export_chrome_trace writes one.",
    schema={
        "type": "object",
        "properties": {
            "traceEvents": {"type": "array"},
            "distributedInfo": {
                "type": ["object", "null"],
                "properties": {
                    "world_size": {"type": ["integer", "null"], "minimum": 0},
                    "pg_config": {"type": ["array", "null"], "items": _GROUP},
                },
            },
        },
        "required": ["traceEvents"],
    },
    most_bytes=128 * MIB,
)


def _event(arguments: dict[str, Any]) -> Form:
    """An event with these among its arguments, if it has them."""
    of_arguments = {
        "type": "object",
        "properties": {"External id": {"type": ["string", "number", "null"]}, **arguments},
    }
    fields = {"dur": {"type": "number", "minimum": 0}, "args": of_arguments}
    schema = {"type": "object", "properties": fields, "required": ["dur"]}
    return dataclasses.replace(PROFILE, schema=schema)


_KERNEL = _event(
    {
        "Group size": {"type": "integer", "minimum": 0, "maximum": _MOST_RANKS},
        "In msg nelems": _COUNT,
        "Process Group Ranks": _COUNTS,
        "In split size": _COUNTS,
        "Out split size": _COUNTS,
    }
)
_OPERATION = _event({})


def parse(trace: Any, file: str, *, ranks_per_node: int) -> Measurements:
    """Read a profile. ``ranks_per_node`` places its groups. Raises TopologyError if it is none."""
    checked(trace, PROFILE, file)
    events = _read_events(trace["traceEvents"], file)
    info = trace.get("distributedInfo") or {}
    world = info.get("world_size") or 0
    found = Measurements(source=f"profile, shortest of equal calls, {file}")
    groups = [_numbers(g.get("ranks")) for g in info.get("pg_config") or ()]
    of_gloo = _of_gloo(events, groups[0], world, ranks_per_node) if len(groups) == 1 else ()
    for key, payload, us in (*_collectives(events, world, ranks_per_node), *of_gloo):
        _keep(found.collectives.setdefault(key, {}), payload, us)
    for dtype, shape, us in _products(events):
        _keep(found.products.setdefault(dtype, {}), shape, us)
    return found


def _read_events(all_events: Sequence[Any], file: str) -> list[Event]:
    """Kernels, gloo's spans, and the operators that multiply: what else a profile holds is nobody's business here."""
    events = []
    for at, event in enumerate(all_events):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        if event.get("cat") == "kernel":
            events.append(checked(event, _KERNEL, file, ("traceEvents", at)))
        elif type(event.get("name")) is str and (event["name"] in PRODUCTS or _gloo_kind(event)):
            events.append(checked(event, _OPERATION, file, ("traceEvents", at)))
    return events


def _keep(times: dict[Any, float], key: Any, us: float) -> None:
    times[key] = min(us, times.get(key, math.inf))


def _kernels(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.get("cat") == "kernel"]


def _collectives(
    events: Sequence[Event], world: int, ranks_per_node: int
) -> Iterator[tuple[GroupKey, int, float]]:
    nodes: dict[tuple[int, ...], int] = {}
    for event in _kernels(events):
        args = event.get("args", {})
        kind = COLLECTIVES.get(str(args.get("Collective name", "")))
        size, item = args.get("Group size"), BYTES.get(str(args.get("dtype")))
        elements = args.get("In msg nelems")
        if not kind or not item or not size or not elements or not event["dur"]:
            continue
        if size < 2 or _is_uneven(args, size):
            continue
        known = tuple(_numbers(args.get("Process Group Ranks")))
        if (size, *known) not in nodes:
            shape = shape_of_ranks(_ranks(known, size), ranks_per_node, max(world, size))
            nodes[size, *known] = shape.nodes
        yield (kind, size, nodes[size, *known]), elements * item, float(event["dur"])


def _gloo_kind(event: Event) -> str:
    if not event["name"].startswith("gloo:"):
        return ""
    kind = event["name"].removeprefix("gloo:")
    return kind if kind in COLLECTIVES.values() else ""


def _of_gloo(
    events: Sequence[Event], ranks: Sequence[int], world: int, ranks_per_node: int
) -> Iterator[tuple[GroupKey, int, float]]:
    if len(set(ranks)) < max(2, len(ranks)):
        return
    shape = shape_of_ranks(ranks, ranks_per_node, max(world, len(ranks)))
    for event in events:
        if event.get("cat") == "kernel" or not (kind := _gloo_kind(event)) or not event["dur"]:
            continue
        args = event.get("args", {})
        shapes, types = args.get("Input Dims"), args.get("Input type")
        # Of several that are coalesced nobody says which took how long.
        if not isinstance(shapes, list) or not isinstance(types, list) or len(shapes) != 1:
            continue
        item = BYTES_OF_TYPES.get(str(types[0])) if len(types) == 1 else None
        if item and _is_shape(shapes[0]) and (elements := math.prod(shapes[0])):
            yield (kind, len(ranks), shape.nodes), elements * item, float(event["dur"])


def _is_uneven(args: Event, size: int) -> bool:
    """Return whether ranks exchange different shares: the time is not one of the payload alone then."""
    for key in ("In split size", "Out split size"):
        shares = _numbers(args.get(key))
        if len(set(shares)) > 1 or (shares and len(shares) < size):
            return True
    return False


def _ranks(known: Sequence[int], size: int) -> Sequence[int]:
    """Global ranks of the group. Long lists are cut short in profiles: the stride goes on then."""
    if len(set(known)) < len(known):
        known = ()  # no ranks of a group
    if len(known) == size:
        return known
    first, stride = (known[0], known[1] - known[0]) if len(known) > 1 else (0, 1)
    return range(first, first + size * stride, stride)


def _numbers(value: object) -> list[int]:
    """A list of numbers, as such or as text; what cannot be read of it is left out."""
    if isinstance(value, list):
        return value
    words = str(value or "").strip("[] ").split(",")
    return [int(word) for word in words if _NUMBER.fullmatch(word.strip())]


def _products(events: Sequence[Event]) -> Iterator[tuple[str, Product, float]]:
    kernels = _kernels(events)
    by_launch: dict[object, list[Event]] = {}
    for kernel in kernels:
        by_launch.setdefault(kernel.get("args", {}).get("External id"), []).append(kernel)
    for event in events:
        if event.get("cat") == "kernel" or event["name"] not in PRODUCTS:
            continue
        args = event.get("args", {})
        operands = _operands(args, PRODUCTS[event["name"]])
        if operands is None:
            continue
        us = float(event["dur"])
        if kernels:
            started = by_launch.get(args.get("External id"), [])
            us = sum(float(kernel["dur"]) for kernel in started)
        if us > 0:
            yield (*operands, us)


def _operands(args: Event, first: int) -> tuple[str, Product] | None:
    """Dtype and shape of a product; None where the profile did not record them."""
    shapes, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list) or len(shapes) < first + 2:
        return None
    if len(types) <= first or not _is_shape(shapes[first]) or not _is_shape(shapes[first + 1]):
        return None
    left, right, dtype = shapes[first], shapes[first + 1], DTYPES.get(str(types[first]))
    if dtype is None or len(left) < 2 or len(left) != len(right) or not all((*left, *right)):
        return None
    *batch, m, k = left
    return dtype, (math.prod(batch), m, k, right[-1])


def _is_shape(value: object) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size <= MOST for size in value
    )
