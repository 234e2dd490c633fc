"""From tables of a few group shapes to the figures that predict all others.

The formulas are those of ``alpha_beta.py``, solved for a link's start, step and rate: a ring of n ranks takes
n - 1 steps for a gather and twice as many for an all-reduce, and its gather moves n - 1 payloads.
"""

from __future__ import annotations

from dataclasses import dataclass

from inductor_passes.machine.measure.links import LinkTimes, Points
from inductor_passes.machine.prices.group_shape import GroupShape


@dataclass(frozen=True, slots=True)
class LinkFit:
    """One kind of link: microseconds of a start and of a step, and the rate of a rank's link."""

    start_us: float
    step_us: float
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class ReduceFit:
    """An all-reduce within a node: its start, and the rate of its payload."""

    start_us: float
    gb_per_s: float


def within_node(times: LinkTimes) -> LinkFit | None:
    """The link between ranks of one host; None where each host has one rank."""
    ranks = times.layout.per_node
    if ranks < 2:
        return None
    shape = GroupShape(ranks, 1)
    start, step = _start_and_step(times, shape)
    return LinkFit(start, step, (ranks - 1) / _us_per_byte(times.tables["all_gather", shape]) / 1e3)


def all_reduce_within_node(times: LinkTimes) -> ReduceFit | None:
    """The same for an all-reduce, which a library may do by other means than a ring."""
    if times.layout.per_node < 2:
        return None
    points = times.tables["all_reduce", GroupShape(times.layout.per_node, 1)]
    return ReduceFit(points[min(points)], 1 / _us_per_byte(points) / 1e3)


def across_nodes(times: LinkTimes, start_us: float | None = None) -> LinkFit | None:
    """The link between hosts; None where there is one host.

    Its rate is that of one rank's link, as ranks of a node share the traffic of a ring. ``start_us``: the
    start within a host, where that was measured; the steps take what is left then.
    """
    layout = times.layout
    if layout.nodes < 2:
        return None
    alone = GroupShape(layout.nodes, layout.nodes)
    start, step = _start_and_step(times, alone)
    if start_us is not None:
        gather = times.tables["all_gather", alone]
        small = gather[min(gather)]
        start, step = start_us, max(small - start_us, 0.1 * small) / (alone.size - 1)
    everyone = times.tables["all_gather", GroupShape(layout.ranks, layout.nodes)]
    payloads = (layout.ranks - 1) / layout.per_node
    return LinkFit(start, step, payloads / _us_per_byte(everyone) / 1e3)


def _start_and_step(times: LinkTimes, shape: GroupShape) -> tuple[float, float]:
    """Return start and step by the smallest gather and all-reduce, kept within what noise could have turned around."""
    gather, reduce = (times.tables[kind, shape] for kind in ("all_gather", "all_reduce"))
    small, steps = gather[min(gather)], shape.size - 1
    hops = min(max(reduce[min(reduce)] - small, 0.1 * small), 0.9 * small)
    return small - hops, hops / steps


def _us_per_byte(points: Points) -> float:
    """Microseconds that each further byte of a payload costs."""
    first, last = min(points), max(points)
    slope = (points[last] - points[first]) / max(1, last - first)
    return slope if slope > 0 else points[last] / last
