"""Figures of a graph that every report shows, in text, HTML and JSON: each a function here, and nothing more.

A function takes what was planned for the graph and returns a number, or None where it says nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.records import FigureRecord
from inductor_passes.simulate import Timeline
from inductor_passes.simulate.timeline import COMPUTE_LANE


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """A graph after its passes, its costs, and its predicted timelines before and after them."""

    graph: fx.Graph
    cost: CostModel
    before: Timeline
    after: Timeline


Compute = Callable[[PlannedGraph], float | None]
_figures: dict[str, tuple[str, Compute]] = {}


def figure(name: str, unit: str) -> Callable[[Compute], Compute]:
    """Have reports show what the decorated function returns. ``unit``: ``us``, ``bytes``, or a word of its own."""

    def register(compute: Compute) -> Compute:
        _figures[name] = (unit, compute)
        return compute

    return register


def figures_of(planned: PlannedGraph) -> tuple[FigureRecord, ...]:
    """Every figure that has something to say of the graph, in the order in which they stand here."""
    found = ((name, unit, compute(planned)) for name, (unit, compute) in _figures.items())
    return tuple(
        FigureRecord(name, float(value), unit) for name, unit, value in found if value is not None
    )


@figure("busiest group's link", "us")
def busiest_link(planned: PlannedGraph) -> float | None:
    """Time that the launches of one process group take one after another: no order of them is shorter."""
    lanes: dict[str, float] = defaultdict(float)
    for span in planned.after.spans:
        if span.lane != COMPUTE_LANE:
            lanes[span.lane] += span.duration_us
    return max(lanes.values(), default=None)
