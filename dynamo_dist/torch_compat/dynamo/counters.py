"""Dynamo's counters."""

from __future__ import annotations


def unique_graphs() -> int:
    """Graphs that Dynamo has captured in this process so far. Seen in torch 2.13 to 2.15."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))
