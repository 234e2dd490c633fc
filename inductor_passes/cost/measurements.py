"""Measurements made elsewhere, by group shape and dtype, and the formulas' errors against them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from inductor_passes.cost.collectives import GroupShape
from inductor_passes.cost.machine import Machine
from inductor_passes.cost.topology import Product, Topology

GroupKey = tuple[str, int, int]  # kind, ranks, nodes


@dataclass(slots=True)
class Measurements:
    """Microseconds by what was measured. ``collectives``: (kind, ranks, nodes) -> payload in bytes -> us.

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


def add_to(content: dict[str, Any], found: Measurements) -> None:
    """Put measurements into a topology file's content; a point that is there already is replaced."""
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


def _entry(entries: list[dict[str, Any]], key: dict[str, Any], source: str) -> dict[str, Any]:
    """The entry of a key, made if there is none; its source names every file it is from."""
    for entry in entries:
        if all(entry[name] == value for name, value in key.items()):
            entry["source"] = "; ".join(dict.fromkeys([*entry["source"].split("; "), source]))
            return entry
    entries.append({**key, "source": source, "points": []})
    return entries[-1]


def errors_of(found: Measurements, base: Topology) -> list[dict[str, Any]]:
    """Return how far a topology's predictions were from each table, in percent of what was measured."""
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
    """Return the microseconds of one product, by formulas or by what was measured; its result has its inputs' dtype."""
    b, m, k, n = shape
    size = 1 if dtype == "float8" else getattr(torch, dtype).itemsize
    return Machine(topology).product_us(dtype, shape, b * (m * k + k * n + m * n) * size)


def _row(what: str, source: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    off = [100 * abs(predicted / measured - 1) for measured, predicted in pairs]
    return {
        "table": what,
        "source": source,
        "points": len(pairs),
        "median_error_percent": round(statistics.median(off), 1),
        "worst_error_percent": round(max(off), 1),
    }


def errors_as_text(result: dict[str, Any]) -> str:
    """The same in lines: which file, and each of its ``tables``."""
    lines = [f"{result['out']}: topology {result['topology']!r}"]
    for row in result["tables"]:
        lines.append(
            f"  {row['table']}: {row['points']} points; the formulas were off by "
            f"{row['median_error_percent']} % (median), {row['worst_error_percent']} % at worst"
        )
    return "\n".join(lines)
