"""Errors of a topology's formulas against tables of measurements."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from inductor_passes.machine.importing.measurements import Measurements
from inductor_passes.machine.prices.group_shape import GroupShape
from inductor_passes.machine.prices.machine import Machine
from inductor_passes.machine.topology.measured import Product
from inductor_passes.machine.topology.topology import Topology


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
