"""The distance between two sets of tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

# Relative and absolute: what a few hundred roundings in another order come to in each dtype. A
# compiler may fuse and reassociate, so bitwise equality is not asked for; a wrong shard or a lost
# collective is off by the size of the values.
TOLERANCES: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-10),
    torch.float32: (1e-4, 1e-5),
    torch.bfloat16: (3e-2, 1e-2),
    torch.float16: (1e-2, 1e-3),
}


@dataclass(frozen=True, slots=True)
class Distance:
    """Largest absolute difference, the tensor that has it, and whether all are within tolerance."""

    largest: float = 0.0
    worst: str = ""
    within: bool = True


def distance(
    expected: Mapping[str, torch.Tensor],
    actual: Mapping[str, torch.Tensor],
    rtol: float | None = None,
    atol: float | None = None,
) -> Distance:
    """Compare tensor by tensor. Tolerances default by dtype (``TOLERANCES``, exact for integers).

    A tensor that is missing, or of another shape or dtype, is infinitely far; NaN equals NaN.
    """
    total = Distance()
    for name in sorted({*expected, *actual}):
        one = _one(name, expected.get(name), actual.get(name), rtol, atol)
        further = one.largest > total.largest
        total = Distance(
            largest=max(one.largest, total.largest),
            worst=one.worst if further else total.worst,
            within=total.within and one.within,
        )
    return total


def _one(
    name: str,
    expected: torch.Tensor | None,
    actual: torch.Tensor | None,
    rtol: float | None,
    atol: float | None,
) -> Distance:
    if expected is None or actual is None:
        return Distance(
            math.inf, f"{name} (only in {'eager' if actual is None else 'this'})", False
        )
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        found = (
            f"{actual.dtype} {list(actual.shape)}, expected {expected.dtype} {list(expected.shape)}"
        )
        return Distance(math.inf, f"{name} ({found})", False)
    if expected.numel() == 0:
        return Distance()
    default_rtol, default_atol = TOLERANCES.get(expected.dtype, (0.0, 0.0))
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = expected.to(wide), actual.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=math.inf)
    allowed = (default_atol if atol is None else atol) + (
        default_rtol if rtol is None else rtol
    ) * a.abs()
    return Distance(
        largest=float(gap.max()),
        worst=name,
        within=bool((same | (gap <= allowed)).all()),
    )
