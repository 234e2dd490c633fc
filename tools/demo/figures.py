"""Figures of repeated measurements: the slowest rank of each, ratios of pairs, quartiles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def slowest(times: Sequence[Sequence[float]]) -> list[float]:
    """The longest of each measurement: ``times`` holds one list a rank."""
    return [max(same) for same in zip(*times, strict=True)]


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Of what was measured in one turn."""
    return [a / b for a, b in zip(over, under, strict=True)]


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower and the upper one."""
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]
