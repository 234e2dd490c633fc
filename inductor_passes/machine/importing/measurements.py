"""Findings of an import: times of collectives by group shape, and of products by dtype."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from inductor_passes.machine.topology.measured import Product

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
