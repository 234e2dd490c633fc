"""A profile of torch.profiler (Kineto's Chrome trace) -> measurements.

Collectives are NCCL's kernels, whose metadata name group, dtype and elements. Products are kernels that
``aten::mm`` and its kin started, if the profile recorded shapes; where no kernel runs on a device at all, the
operators themselves, timed on the CPU. Of equal ones the shortest counts: an NCCL kernel lasts longer where it
waits for a rank that is late, and no run is shorter than the work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from inductor_passes.cost.group_shape import shape_of_ranks
from inductor_passes.cost.importing.measurements import GroupKey, Measurements
from inductor_passes.cost.measured import Product
from inductor_passes.errors import TopologyError

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
Event = dict[str, Any]


def parse(trace: Any, file: str, *, ranks_per_node: int) -> Measurements:
    """Read a profile. ``ranks_per_node`` places its groups. Raises TopologyError if it is none."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        raise TopologyError(
            f"{file!r} is no profile: it has no list 'traceEvents'.",
            fix="Give what torch.profiler's export_chrome_trace wrote.",
        )
    events = [e for e in trace["traceEvents"] if isinstance(e, dict) and e.get("ph") == "X"]
    world = int((trace.get("distributedInfo") or {}).get("world_size") or 0)
    found = Measurements(source=f"profile, shortest of equal calls, {file}")
    for key, payload, us in _collectives(events, world, ranks_per_node):
        _keep(found.collectives.setdefault(key, {}), payload, us)
    for dtype, shape, us in _products(events):
        _keep(found.products.setdefault(dtype, {}), shape, us)
    return found


def _keep(times: dict[Any, float], key: Any, us: float) -> None:
    times[key] = min(us, times.get(key, math.inf))


def _kernels(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event.get("cat") == "kernel"]


def _collectives(
    events: Sequence[Event], world: int, ranks_per_node: int
) -> Iterator[tuple[GroupKey, int, float]]:
    for event in _kernels(events):
        args = event.get("args", {})
        kind = COLLECTIVES.get(str(args.get("Collective name", "")))
        size, item = args.get("Group size"), BYTES.get(str(args.get("dtype")))
        elements = args.get("In msg nelems")
        if not kind or not item or not isinstance(size, int) or not isinstance(elements, int):
            continue
        if size < 2 or not elements or _is_uneven(args, size):
            continue
        shape = shape_of_ranks(_ranks(args, size), ranks_per_node, max(world, size))
        yield (kind, size, shape.nodes), elements * item, float(event["dur"])


def _is_uneven(args: Event, size: int) -> bool:
    """Whether ranks exchange different shares: the time is not one of the payload alone then."""
    for key in ("In split size", "Out split size"):
        shares = _numbers(args.get(key))
        if len(set(shares)) > 1 or (shares and len(shares) < size):
            return True
    return False


def _ranks(args: Event, size: int) -> list[int]:
    """Global ranks of the group. Long lists are cut short in profiles: the stride goes on then."""
    known = _numbers(args.get("Process Group Ranks"))
    if len(known) == size:
        return known
    first, stride = (known[0], known[1] - known[0]) if len(known) > 1 else (0, 1)
    return [first + i * stride for i in range(size)]


def _numbers(value: object) -> list[int]:
    """A list of numbers, as such or as text; what cannot be read of it is left out."""
    if isinstance(value, list):
        return [int(v) for v in value]
    words = str(value or "").strip("[] ").split(",")
    return [int(word) for word in words if word.strip().lstrip("-").isdigit()]


def _products(events: Sequence[Event]) -> Iterator[tuple[str, Product, float]]:
    kernels = _kernels(events)
    by_launch: dict[object, list[Event]] = {}
    for kernel in kernels:
        by_launch.setdefault(kernel.get("args", {}).get("External id"), []).append(kernel)
    for event in events:
        if event.get("name") not in PRODUCTS:
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
    left, right, dtype = shapes[first], shapes[first + 1], DTYPES.get(str(types[first]))
    if dtype is None or len(left) < 2 or len(left) != len(right) or not all((*left, *right)):
        return None
    *batch, m, k = left
    return dtype, (math.prod(batch), m, k, right[-1])
