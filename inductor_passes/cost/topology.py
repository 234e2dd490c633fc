"""A machine as the cost model sees it: rates of a device and of links between devices, from a
checked file.

A file is one object::

    {"name": "...", "description": "...", "ranks_per_node": FIGURE,
     "device": {"matmul": {DTYPE: {"peak_tflops": FIGURE, "efficiency": FIGURE}, ...},
                "attention_efficiency": FIGURE, "memory_gb_per_s": FIGURE, "kernel_us": FIGURE,
                "compute_stretch": FIGURE, "launching_us": FIGURE,
                "measured_products": [{"dtype": "bfloat16", "source": "...",
                                       "points": [[BATCH, M, K, N, MICROSECONDS], ...]}, ...]},
     "links": {"intra_node_gb_per_s": FIGURE, "inter_node_gb_per_s": FIGURE,
               "host_gb_per_s": FIGURE,
               "protocols": [{"name": "...", "launch_us": FIGURE,
                              "intra_node": {"step_us": FIGURE, "bandwidth_share": FIGURE},
                              "inter_node": {"step_us": FIGURE, "bandwidth_share": FIGURE}}, ...],
               "all_reduce_in_node": {"launch_us": FIGURE, "gb_per_s": FIGURE},
               "coalesced_start_share": FIGURE, "reduce_scatter_rounds": FIGURE,
               "measured": [{"kind": "all_gather", "ranks": 8, "nodes": 1, "source": "...",
                             "points": [[PAYLOAD_BYTES, MICROSECONDS], ...]}, ...]}}

where FIGURE is ``{"value": NUMBER, "source": "where the number is from"}``; ``compute_stretch``,
``launching_us``, ``host_gb_per_s``, ``all_reduce_in_node``, ``coalesced_start_share``,
``reduce_scatter_rounds`` and both lists of what was measured may be left out. A payload is one
rank's input.
``data/cpu-gloo.json`` is a short one to start from; ``python -m inductor_passes costs import`` adds
measurements to one.

Times of one kind never fall as work grows: where a larger message or product was seen to take less,
the smaller one can as well, since whatever else runs on a machine only ever adds time.

Figures come from JSON files under ``data/`` or from a file of the user's own. Nothing here is
measured at run time.
"""

from __future__ import annotations

import functools
import json
import math
import os
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inductor_passes.errors import TopologyError
from inductor_passes.files import Form, JsonObject, checked, parsed, text_of

_TEXT = {"type": "string", "pattern": "\\S"}
_WHOLE = {"type": "integer", "minimum": 1}
_ABOVE_ZERO = {"type": "number", "exclusiveMinimum": 0}


def _object(optional: tuple[str, ...] = (), **fields: Any) -> JsonObject:
    return {
        "type": "object",
        "properties": fields,
        "required": [name for name in fields if name not in optional],
        "additionalProperties": False,
    }


def _list(item: JsonObject) -> JsonObject:
    return {"type": "array", "items": item, "minItems": 1}


def _figure(**value: Any) -> JsonObject:
    return _object(value={"type": "number", **value}, source=_TEXT)


def _rows(width: int) -> JsonObject:
    """Rows of whole numbers, each with a time behind them."""
    numbers = [{"type": "integer", "minimum": 0}] * (width - 1)
    size = {"minItems": width, "maxItems": width}
    return _list({"type": "array", "prefixItems": [*numbers, _ABOVE_ZERO], **size})


_RATE, _SHARE = _figure(exclusiveMinimum=0), _figure(exclusiveMinimum=0, maximum=1)
_MULTIPLE = _figure(minimum=1)
_HOP = _object(step_us=_RATE, bandwidth_share=_SHARE)
_RATES = _object(peak_tflops=_RATE, efficiency=_SHARE)
_SCHEMA = _object(
    name=_TEXT,
    description=_TEXT,
    ranks_per_node=_figure(minimum=1, multipleOf=1),
    device=_object(
        ("compute_stretch", "launching_us", "measured_products"),
        matmul={"type": "object", "additionalProperties": _RATES, "required": ["float32"]},
        attention_efficiency=_SHARE,
        memory_gb_per_s=_RATE,
        kernel_us=_RATE,
        compute_stretch=_MULTIPLE,
        launching_us=_RATE,
        measured_products=_list(_object(dtype=_TEXT, source=_TEXT, points=_rows(5))),
    ),
    links=_object(
        (
            "host_gb_per_s",
            "all_reduce_in_node",
            "coalesced_start_share",
            "reduce_scatter_rounds",
            "measured",
        ),
        intra_node_gb_per_s=_RATE,
        inter_node_gb_per_s=_RATE,
        host_gb_per_s=_RATE,
        protocols=_list(_object(name=_TEXT, launch_us=_RATE, intra_node=_HOP, inter_node=_HOP)),
        all_reduce_in_node=_object(launch_us=_RATE, gb_per_s=_RATE),
        coalesced_start_share=_SHARE,
        reduce_scatter_rounds=_MULTIPLE,
        measured=_list(
            _object(kind=_TEXT, ranks=_WHOLE, nodes=_WHOLE, source=_TEXT, points=_rows(2))
        ),
    ),
)


def form(fix: str) -> Form:
    """The format, for the reader of all formats."""
    return Form("topology", TopologyError, fix, _SCHEMA)


def sources_of(data: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Path and source of every figure and list of measurements."""
    if isinstance(data, list):
        for index, item in enumerate(data):
            yield from sources_of(item, f"{path}[{index}]")
    elif isinstance(data, dict):
        if "source" in data:
            yield path, data["source"]
        for name, item in data.items():
            yield from sources_of(item, f"{path}.{name}" if path else name)


def dump_topology(value: Any, indent: int = 0) -> str:
    """A topology's content as JSON with one line per figure and per row of measurements."""
    pad = "  " * indent
    if isinstance(value, dict) and set(value) != {"value", "source"}:
        items = [
            f"{pad}  {json.dumps(k)}: {dump_topology(v, indent + 1)}" for k, v in value.items()
        ]
        return "{\n" + ",\n".join(items) + f"\n{pad}}}"
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        items = [f"{pad}  {dump_topology(item, indent + 1)}" for item in value]
        return "[\n" + ",\n".join(items) + f"\n{pad}]"
    return json.dumps(value)


Product = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """One kind of collective on groups of one shape: ``ranks`` on ``nodes`` nodes.

    ``points``: payload in bytes, which is one rank's input, and microseconds, by payload.
    """

    kind: str
    ranks: int
    nodes: int
    points: tuple[tuple[float, float], ...]

    def us(self, payload_bytes: float) -> float:
        """Time of one launch: linear between points, the first below them, the last rate beyond
        them.
        """
        return interpolate(self.points, payload_bytes)


@dataclass(frozen=True, slots=True)
class MeasuredProducts:
    """Matrix products of one dtype.

    ``points``: batch, m, k and n of [m, k] x [k, n], and microseconds, sorted. ``curve``:
    operations and microseconds of the best product of that many operations, by operations.
    """

    dtype: str
    points: tuple[tuple[Product, float], ...]
    curve: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, dtype: str, shapes: Mapping[Product, float]) -> MeasuredProducts:
        """The curve that the shapes give: only what is not beaten by a larger product at once."""
        curve = rising([(2.0 * math.prod(shape), us) for shape, us in shapes.items()])
        return cls(dtype, tuple(sorted(shapes.items())), curve)

    def us(self, shape: Product) -> float | None:
        """Time of a product of this very shape; None where it was not measured."""
        at = bisect_left(self.points, (shape,))
        found = at < len(self.points) and self.points[at][0] == shape
        return self.points[at][1] if found else None

    def us_of_operations(self, operations: float) -> float:
        """Time of the best product of so many operations."""
        return interpolate(self.curve, operations)


def rising(points: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """Points by size, one of each size, times made to never fall: each is the least from there
    on.
    """
    found: list[tuple[float, float]] = []
    least = math.inf
    for size, us in sorted(points, reverse=True):
        least = min(least, us)
        if found and found[-1][0] == size:
            found.pop()
        found.append((size, least))
    return tuple(reversed(found))


def interpolate(points: Sequence[tuple[float, float]], size: float) -> float:
    """Linear between points; the first time below them; beyond them at the rate of the last."""
    right = bisect_left(points, (size,))
    if right == len(points):
        last_size, last_us = points[-1]
        return last_us * size / last_size if last_size else last_us
    if right == 0:
        return points[0][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


_DATA = Path(__file__).parent / "data"
_DEFAULTS = {"cuda": "h100x8"}
_FALLBACK_DTYPE = "float32"
_registered: dict[str, Path] = {}


@dataclass(frozen=True, slots=True)
class MatmulRate:
    """Matrix products of one dtype: the vendor's dense peak, and the share of it that is
    reached.
    """

    peak_tflops: float
    efficiency: float

    @property
    def flops_per_us(self) -> float:
        """Reached rate."""
        return self.peak_tflops * self.efficiency * 1e6


@dataclass(frozen=True, slots=True)
class LinkProtocol:
    """One way the communication library drives a link; it picks the fastest for each message.

    A step is one hop of a ring or tree. ``*_share`` is the part of the link's rate that is reached.
    """

    name: str
    launch_us: float
    intra_step_us: float
    intra_share: float
    inter_step_us: float
    inter_share: float


@dataclass(frozen=True, slots=True)
class NodeAllReduce:
    """An all-reduce within one node that is no ring: a start, then the payload at a rate of its
    own.

    NVLink SHARP, where the switch adds up; or an algorithm of the library's own.
    """

    launch_us: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Topology:
    """Rates of one device and its links. GB/s is 1e9 bytes a second, per device and direction.

    ``matmul`` is keyed by dtype name (``float32``, ``bfloat16``, ``float16``, ``float64``,
    ``int8``; ``float8`` stands for every 8-bit float). ``coalesced_start_share`` is the part of its
    start that each launch but the first saves in a coalesced call; 0 where such a call runs one
    after another.
    ``reduce_scatter_rounds``: 1, or 2 where the library runs an all_reduce and drops what is not
        this rank's.
    ``launching_us``: processor time that a launch takes of what computes; 0 where a device computes
        and the host runs ahead of it.
    ``host_gb_per_s``: of copies between a device and pinned memory of its host, each way; 0 where
        nobody says.
    ``compute_stretch``: how many times as long a kernel takes while a collective is on its way; 1
        unless measured. ``collectives`` and ``products`` were measured, and count instead of the
        formulas. ``sources`` maps each figure's path to where it is from.
    """

    name: str
    ranks_per_node: int
    matmul: tuple[tuple[str, MatmulRate], ...]
    attention_efficiency: float
    memory_gb_per_s: float
    kernel_us: float
    compute_stretch: float
    intra_gb_per_s: float
    inter_gb_per_s: float
    protocols: tuple[LinkProtocol, ...]
    all_reduce_in_node: NodeAllReduce | None
    coalesced_start_share: float
    reduce_scatter_rounds: float
    collectives: tuple[MeasuredCollective, ...]
    products: tuple[MeasuredProducts, ...]
    sources: tuple[tuple[str, str], ...] = field(repr=False)
    launching_us: float = 0.0
    host_gb_per_s: float = 0.0

    def matmul_rate(self, dtype_name: str) -> MatmulRate:
        """Rate of a dtype; one that the file does not name is taken at float32's."""
        rates = dict(self.matmul)
        return rates.get(_float8_as_one(dtype_name), rates[_FALLBACK_DTYPE])

    def measured_collective(self, kind: str, ranks: int, nodes: int) -> MeasuredCollective | None:
        """Return the measurements of one kind of collective on groups of one shape, if there are
        any.
        """
        wanted = (kind, ranks, nodes)
        return next((c for c in self.collectives if (c.kind, c.ranks, c.nodes) == wanted), None)

    def measured_product_us(self, dtype_name: str, shape: Product, us: float) -> float | None:
        """Time of a matrix product by what was measured of its dtype, the start of its kernel
        included.

        ``us``: what its memory traffic takes, the least for a product of another shape. None where
        nothing was measured of its dtype.
        """
        key = _float8_as_one(dtype_name)
        measured = next((p for p in self.products if p.dtype == key), None)
        if measured is None:
            return None
        return measured.us(shape) or max(measured.us_of_operations(2.0 * math.prod(shape)), us)

    @property
    def memory_bytes_per_us(self) -> float:
        """Reached rate of device memory."""
        return self.memory_gb_per_s * 1e3


def _float8_as_one(dtype_name: str) -> str:
    return "float8" if dtype_name.startswith("float8") else dtype_name


def shipped_topologies() -> tuple[str, ...]:
    """Names that ``load_topology`` knows without a path, sorted."""
    return tuple(sorted(path.stem for path in _DATA.glob("*.json")))


def register_topology(name: str, path: str | os.PathLike[str]) -> None:
    """Have ``load_topology(name)`` read ``path``, so that users can name it in ``options``.

    Raises TopologyError if the file is bad or the name is taken by another one.
    """
    taken = _registered.get(name, Path(path)) != Path(path)
    if name in shipped_topologies() or taken:
        raise TopologyError(
            f"A topology named {name!r} is there already.",
            "A name must mean the same machine on every rank.",
            f"Choose another; taken are {', '.join((*shipped_topologies(), *_registered))}.",
        )
    load_topology(path)
    _registered[name] = Path(path)


def registered_topologies() -> tuple[str, ...]:
    """Names that ``register_topology`` has added."""
    return tuple(_registered)


def forget_topologies(but: Sequence[str] = ()) -> None:
    """Undo ``register_topology``, except for the names in ``but``."""
    for name in registered_topologies():
        if name not in but:
            del _registered[name]


def default_topology(device_type: str) -> str:
    """The topology taken when the user names none.

    By device type alone: a look at the device at hand could differ between ranks, and ranks that
    plan for different machines plan differently. ``cuda`` gives ``h100x8``, everything else
    ``cpu-gloo``.
    """
    return _DEFAULTS.get(device_type, "cpu-gloo")


def load_topology(name_or_path: str | os.PathLike[str]) -> Topology:
    """Read a shipped or registered topology by name, or a JSON file by path.

    Raises TopologyError if there is no such name or file, or the file is not JSON, lacks a field,
    has a key that we do not know, or a figure that is no positive number.
    """
    file = os.fspath(name_or_path)
    return built(topology_text(file), file, is_known_good=file in shipped_topologies())


@functools.lru_cache(maxsize=32)
def built(content: str, file: str, *, is_known_good: bool = False) -> Topology:
    """The topology that a file's content is. Raises TopologyError, which calls it ``file``, if
    it is none.
    """
    of_file = form(_fix())
    data = parsed(content, file, of_file)
    if not is_known_good:
        checked(data, of_file, file)
    for path, name, keys in (
        ("links", "measured", ("kind", "ranks", "nodes")),
        ("device", "measured_products", ("dtype",)),
    ):
        entries = data[path].get(name, [])
        if len({tuple(entry[key] for key in keys) for entry in entries}) < len(entries):
            rule = f"must have one entry of each {', '.join(keys)}: only one of two could count"
            raise of_file.wrong(file, (path, name), entries, rule)
    return _build(data)


def topology_text(name_or_path: str | os.PathLike[str]) -> str:
    """The JSON of a shipped or registered topology or of a file. Raises TopologyError if there
    is none.
    """
    text = os.fspath(name_or_path)
    shipped = text in shipped_topologies()
    path = _DATA / f"{text}.json" if shipped else _registered.get(text, Path(text))
    return text_of(path, form(_fix()), text)


def _fix() -> str:
    known = ", ".join((*shipped_topologies(), *_registered))
    return f"Known topologies: {known}; or give the path of a JSON file of the same form."


def _build(data: JsonObject) -> Topology:
    device, links = data["device"], data["links"]

    def figure(section: JsonObject, name: str, default: float = 0.0) -> float:
        return float(section[name]["value"]) if name in section else default

    protocols = tuple(
        LinkProtocol(
            name=entry["name"],
            launch_us=figure(entry, "launch_us"),
            intra_step_us=figure(entry["intra_node"], "step_us"),
            intra_share=figure(entry["intra_node"], "bandwidth_share"),
            inter_step_us=figure(entry["inter_node"], "step_us"),
            inter_share=figure(entry["inter_node"], "bandwidth_share"),
        )
        for entry in links["protocols"]
    )
    own = links.get("all_reduce_in_node")
    return Topology(
        name=data["name"],
        ranks_per_node=int(figure(data, "ranks_per_node")),
        matmul=tuple(
            (dtype, MatmulRate(figure(rate, "peak_tflops"), figure(rate, "efficiency")))
            for dtype, rate in device["matmul"].items()
        ),
        attention_efficiency=figure(device, "attention_efficiency"),
        memory_gb_per_s=figure(device, "memory_gb_per_s"),
        kernel_us=figure(device, "kernel_us"),
        compute_stretch=figure(device, "compute_stretch", 1.0),
        intra_gb_per_s=figure(links, "intra_node_gb_per_s"),
        inter_gb_per_s=figure(links, "inter_node_gb_per_s"),
        protocols=protocols,
        all_reduce_in_node=own and NodeAllReduce(figure(own, "launch_us"), figure(own, "gb_per_s")),
        coalesced_start_share=figure(links, "coalesced_start_share"),
        reduce_scatter_rounds=figure(links, "reduce_scatter_rounds", 1.0),
        collectives=tuple(
            MeasuredCollective(
                entry["kind"],
                entry["ranks"],
                entry["nodes"],
                rising([(payload, us) for payload, us in entry["points"]]),
            )
            for entry in links.get("measured", [])
        ),
        products=tuple(
            MeasuredProducts.of(
                entry["dtype"], {(b, m, k, n): us for b, m, k, n, us in entry["points"]}
            )
            for entry in device.get("measured_products", [])
        ),
        sources=tuple(sources_of(data)),
        launching_us=figure(device, "launching_us"),
        host_gb_per_s=figure(links, "host_gb_per_s"),
    )
