"""Times that were measured, where a topology file has them: they stand in for the formulas.

Times of one kind never fall as work grows: where a larger message or product was seen to take less, the
smaller one can as well, since whatever else runs on a machine only ever adds time.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
        """Time of one launch: linear between points, the first below them, the last rate beyond them."""
        return interpolate(self.points, payload_bytes)


@dataclass(frozen=True, slots=True)
class MeasuredProducts:
    """Matrix products of one dtype.

    ``points``: batch, m, k and n of [m, k] x [k, n], and microseconds, sorted. ``curve``: operations and
    microseconds of the best product of that many operations, by operations.
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
    """Points by size, one of each size, times made to never fall: each is the least from there on."""
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
