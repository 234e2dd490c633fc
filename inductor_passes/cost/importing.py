"""Import measurements made elsewhere: profiles of ``torch.profiler`` and output of NCCL-tests.

Collectives are NCCL's kernels, whose metadata name group, dtype and elements; or gloo's spans, from
when one of its threads begins until it has the result, in a job of one group: they do not name
theirs. Products are kernels that ``aten::mm`` and its kin started, if the profile recorded shapes;
where no kernel runs on a device at all, the operators themselves, timed on the CPU. Of equal ones
the shortest counts: an NCCL kernel lasts longer where it waits for a rank that is late, and no run
is shorter than the work.

Columns are found by the names in the table's head, which differ between versions. The time out of
place is taken, as compiled code calls collectives. The first column counts what the benchmark calls
the size: of an all-gather and a gather that is the gathered bytes, of all others one rank's input.
"""

from __future__ import annotations

import dataclasses
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from inductor_passes.cost.collectives import GroupShape, shape_of_ranks
from inductor_passes.cost.machine import Machine
from inductor_passes.cost.topology import Product, Topology
from inductor_passes.errors import TopologyError
from inductor_passes.files import MIB, MOST, Form, JsonObject, checked, shown

GroupKey = tuple[str, int, int]  # kind, ranks, nodes


@dataclass(slots=True)
class Measurements:
    """Microseconds by what was measured. ``collectives``: (kind, ranks, nodes) -> payload in bytes
    -> us.

    A payload is one rank's input. ``products``: dtype -> (batch, m, k, n) -> us.
    """

    source: str
    collectives: dict[GroupKey, dict[int, float]] = field(default_factory=dict)
    products: dict[str, dict[Product, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.collectives or self.products)


def medians(samples: Iterable[tuple[int, float]]) -> dict[int, float]:
    """The median time of each payload."""
    by_size: dict[int, list[float]] = defaultdict(list)
    for size, us in samples:
        by_size[size].append(us)
    return {size: statistics.median(times) for size, times in by_size.items()}


def add_to(content: JsonObject, found: Measurements) -> None:
    """Put measurements into a topology file's content; a point that is there already is
    replaced.
    """
    measured = content["links"].setdefault("measured", [])
    for (kind, ranks, nodes), by_payload in found.collectives.items():
        entry = _entry(measured, {"kind": kind, "ranks": ranks, "nodes": nodes}, found.source)
        times = dict(entry["points"]) | by_payload
        entry["points"] = [[payload, us] for payload, us in sorted(times.items())]
    products = content["device"].setdefault("measured_products", [])
    for dtype, by_shape in found.products.items():
        entry = _entry(products, {"dtype": dtype}, found.source)
        known = {tuple(shape): us for *shape, us in entry["points"]} | by_shape
        entry["points"] = [[*shape, us] for shape, us in sorted(known.items())]
    for section, name in ((content["links"], "measured"), (content["device"], "measured_products")):
        if not section[name]:
            del section[name]


def _entry(entries: list[JsonObject], key: JsonObject, source: str) -> JsonObject:
    """The entry of a key, made if there is none; its source names every file it is from."""
    for entry in entries:
        if all(entry[name] == value for name, value in key.items()):
            entry["source"] = "; ".join(dict.fromkeys([*entry["source"].split("; "), source]))
            return entry
    entries.append({**key, "source": source, "points": []})
    return entries[-1]


def errors_of(found: Measurements, base: Topology) -> list[JsonObject]:
    """Return how far a topology's predictions were from each table, in percent of what was
    measured.
    """
    rows = []
    machine = Machine(base)
    for (kind, ranks, nodes), times in found.collectives.items():
        group = GroupShape(ranks, nodes)
        pairs = [(us, machine.call_us(kind, [size], group)) for size, us in times.items()]
        rows.append(_row(f"{kind}, {ranks} ranks on {nodes} nodes", found.source, pairs))
    for dtype, products in found.products.items():
        pairs = [(us, product_us(base, dtype, shape)) for shape, us in products.items()]
        rows.append(_row(f"products, {dtype}", found.source, pairs))
    return rows


def product_us(topology: Topology, dtype: str, shape: Product) -> float:
    """Return the microseconds of one product, by formulas or by what was measured; its result
    has its inputs' dtype.
    """
    b, m, k, n = shape
    size = 1 if dtype == "float8" else getattr(torch, dtype).itemsize
    return Machine(topology).product_us(dtype, shape, b * (m * k + k * n + m * n) * size)


def _row(what: str, source: str, pairs: list[tuple[float, float]]) -> JsonObject:
    off = [100 * abs(predicted / measured - 1) for measured, predicted in pairs]
    return {
        "table": what,
        "source": source,
        "points": len(pairs),
        "median_error_percent": round(statistics.median(off), 1),
        "worst_error_percent": round(max(off), 1),
    }


def errors_as_text(result: JsonObject) -> str:
    """The same in lines: which file, and each of its ``tables``."""
    lines = [f"{result['out']}: topology {result['topology']!r}"]
    for row in result["tables"]:
        lines.append(
            f"  {row['table']}: {row['points']} points; the formulas were off by "
            f"{row['median_error_percent']} % (median), {row['worst_error_percent']} % at worst"
        )
    return "\n".join(lines)


# Name of the benchmark -> our kind, and whether its size counts what all ranks give together.
BENCHMARKS = {
    "all_reduce": ("all_reduce", False),
    "all_gather": ("all_gather", True),
    "reduce_scatter": ("reduce_scatter", False),
    "alltoall": ("all_to_all", False),
    "broadcast": ("broadcast", False),
    "reduce": ("reduce", False),
    "gather": ("gather", True),
    "scatter": ("scatter", False),
    "sendrecv": ("permute", False),
}
_STARTING = re.compile(r"Collective test starting: (\w+?)_perf")
_BENCHMARK = re.compile(r"\b(" + "|".join(BENCHMARKS) + r")_perf")
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\b.*\bon\s+(\S+)\s+device\b")
_MOST_CHARACTERS = 8 << 20
_ROW = re.compile(r"^\s*\d+\s+\d+\s+\w+")


def parse_nccl_tests(
    text: str,
    file: str,
    *,
    kind: str | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
) -> Measurements:
    """Read one output, of one benchmark on one set of ranks.

    ``kind`` is a benchmark's name without ``_perf``; without it the output must name it, as
    versions from 2.18 do, or the file's name. ``ranks`` and ``nodes`` override what the output
    says. Raises TopologyError where one of them is not to be found, or a row cannot be read.
    """
    if len(text) > _MOST_CHARACTERS:
        raise TopologyError(
            f"{file!r} has more than {_MOST_CHARACTERS >> 20} million characters.",
            "What one benchmark prints has some thousands.",
            "Give its output alone.",
        )
    kind = kind or _benchmark(text, file)
    if kind not in BENCHMARKS:
        raise TopologyError(
            f"{file!r} does not say which benchmark it is of.",
            "Sizes mean different things in different ones.",
            f"Give it with --kind: {', '.join(BENCHMARKS)}.",
        )
    found = filter(None, map(_RANK.match, text.splitlines()))
    hosts = {match[1]: match[2] for match in found}
    ranks = ranks or len(hosts)
    nodes = nodes or len(set(hosts.values()))
    if not 1 <= nodes <= ranks:
        raise TopologyError(
            f"{file!r} does not say on how many ranks it ran.",
            "It has no lines of the form '# Rank 0 ... on HOST device 0'.",
            "Give them with --ranks and --nodes.",
        )
    name, gathered = BENCHMARKS[kind]
    share = ranks if gathered else 1
    rows = [(size // share, us) for size, us in _rows(text, file)]
    if not rows:
        raise TopologyError(
            f"{file!r} has no row of times.",
            "Expected is what NCCL-tests print: a head with 'size' and 'time', and rows below it.",
            "Give the whole output.",
        )
    return Measurements(
        source=f"NCCL-tests, {kind} on {ranks} ranks of {nodes} nodes, {file}",
        collectives={(name, ranks, nodes): medians(rows)},
    )


def _benchmark(text: str, file: str) -> str:
    for pattern, where in ((_STARTING, text), (_BENCHMARK, file), (_BENCHMARK, text)):
        names = set(pattern.findall(where))
        if len(names) == 1:
            return str(names.pop())
    return ""


def _rows(text: str, file: str) -> list[tuple[int, float]]:
    rows: list[tuple[int, float]] = []
    time = None
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip().lstrip("#").split()
        if words[:2] == ["size", "count"] and "time" in words:
            time = words.index("time")
        elif "(elements)" in words and "(us)" not in words:
            raise TopologyError(
                f"{file!r}, line {number}: times are not in microseconds.", fix="Measure in those."
            )
        elif time is not None and _ROW.match(line):
            try:
                rows.append((int(words[0]), us := float(words[time])))
                if not us <= MOST or rows[-1][0] > MOST:
                    raise ValueError
            except (ValueError, IndexError):
                raise TopologyError(
                    f"{file!r}, line {number}: {shown(line.strip())} has no time in column "
                    f"{time + 1}.",
                    fix="Give the output as it was printed.",
                ) from None
    return [(size, us) for size, us in rows if size and us > 0]


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
    "Byte": 1, "Char": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
    "Half": 2, "BFloat16": 2, "Short": 2,
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
    **{name: getattr(torch, dtype).itemsize for name, dtype in DTYPES.items()},
    "long": 8,
    "int": 4,
}
Event = JsonObject

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


def _event(arguments: JsonObject) -> Form:
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


def parse_profile(trace: Any, file: str, *, ranks_per_node: int) -> Measurements:
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
    """Kernels, gloo's spans, and the operators that multiply: what else a profile holds is
    nobody's business here.
    """
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
    """Return whether ranks exchange different shares: the time is not one of the payload alone
    then.
    """
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
