"""The machine that measured times show: a topology in which what was measured stands in the place of formulas."""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from inductor_passes.machine.prices.alpha_beta import collective_us
from inductor_passes.machine.prices.group_shape import GroupShape
from inductor_passes.machine.times.times import LaunchTime, NodeTime, Times
from inductor_passes.machine.topology.measured import (
    MeasuredCollective,
    MeasuredProducts,
    interpolate,
    rising,
)
from inductor_passes.machine.topology.topology import Topology

# Payloads of the points that a curve gets beside those that were measured.
_DOUBLING = tuple(float(2**i) for i in range(10, 34))
# Two payloads closer than this do not tell a start from a rate.
_APART = 2.0


def topology_of(base: Topology, times: Times) -> Topology:
    """The topology ``base`` as the times show it.

    Kernels and links of which nothing was measured become slower or faster as those of which something was.
    """
    products: dict[str, list[NodeTime]] = defaultdict(list)
    others: list[NodeTime] = []
    for node in times.computed():
        (products[node.dtype] if node.product else others).append(node)
    of_all = _ratio([*others, *(n for found in products.values() for n in found)])
    kernels = _ratio(others) if others else of_all
    of_dtype = {dtype: _ratio(found) for dtype, found in products.items()}
    launches = list(times.launched())
    links, inter = (_links(launches, times, between) for between in (False, True))
    scaled = dataclasses.replace(
        base,
        matmul=tuple(
            (dtype, dataclasses.replace(rate, peak_tflops=rate.peak_tflops / of_dtype.get(dtype, of_all)))
            for dtype, rate in base.matmul
        ),
        memory_gb_per_s=base.memory_gb_per_s / kernels,
        kernel_us=base.kernel_us * kernels,
        launching_us=base.launching_us * kernels,
        products=tuple(_slower(p, of_dtype.get(p.dtype, of_all)) for p in base.products),
        compute_stretch=times.compute_stretch,
        inter_stretch=None if times.inter_stretch is None else times.inter_stretch[0],
        intra_gb_per_s=base.intra_gb_per_s / links,
        inter_gb_per_s=base.inter_gb_per_s / inter,
        protocols=tuple(
            dataclasses.replace(
                p,
                launch_us=p.launch_us * links,
                intra_step_us=p.intra_step_us * links,
                inter_step_us=p.inter_step_us * inter,
            )
            for p in base.protocols
        ),
        all_reduce_in_node=base.all_reduce_in_node
        and dataclasses.replace(
            base.all_reduce_in_node,
            launch_us=base.all_reduce_in_node.launch_us * links,
            gb_per_s=base.all_reduce_in_node.gb_per_s / links,
        ),
        collectives=tuple(
            dataclasses.replace(
                c, points=tuple((size, us * (inter if c.nodes > 1 else links)) for size, us in c.points)
            )
            for c in base.collectives
        ),
    )  # fmt: skip
    return dataclasses.replace(scaled, collectives=_with_curves(scaled, launches))


def _links(launches: Sequence[LaunchTime], times: Times, between: bool) -> float:
    """How many times as long as predicted links within a node take, or those between; as all did where none was measured."""
    said = [launch for launch in launches if launch.predicted_us > 0]
    own = [launch for launch in said if (launch.nodes > 1) == between]
    return _ratio(own or said) * times.launch_stretch_on(2 if between else 1)


def _ratio(found: Sequence[NodeTime] | Sequence[LaunchTime]) -> float:
    """How many times as long as predicted they took together; 1 where nothing was predicted or measured."""
    took, said = sum(t.us for t in found), sum(t.predicted_us for t in found)
    return took / said if took > 0 and said > 0 else 1.0


def _slower(products: MeasuredProducts, factor: float) -> MeasuredProducts:
    return MeasuredProducts.of(
        products.dtype, {shape: us * factor for shape, us in products.points}
    )


def _with_curves(
    topology: Topology, launches: Iterable[LaunchTime]
) -> tuple[MeasuredCollective, ...]:
    """The topology's collectives; those of a kind and group of which something was measured, by that.

    They take as many times as long as beside compute.
    """
    found: dict[tuple[str, int, int], dict[int, list[float]]] = {}
    for launch in launches:
        key = launch.kind, launch.ranks, launch.nodes
        us = launch.us * launch.stretch
        found.setdefault(key, {}).setdefault(launch.payload_bytes, []).append(us)
    kept = [c for c in topology.collectives if (c.kind, c.ranks, c.nodes) not in found]
    for (kind, ranks, nodes), by_payload in sorted(found.items()):
        measured = [(float(size), statistics.median(us)) for size, us in by_payload.items()]
        shape = GroupShape(ranks, nodes)
        formula = [(size, collective_us(kind, size, shape, topology)) for size in _DOUBLING]
        kept.append(MeasuredCollective(kind, ranks, nodes, curve(measured, formula)))
    return tuple(kept)


def curve(
    measured: Sequence[tuple[float, float]], formula: Sequence[tuple[float, float]]
) -> tuple[tuple[float, float], ...]:
    """Times by payload: as measured, between these linear, and beyond them what they and the formula say.

    Where two payloads tell a start from a rate, that line goes on; a single one moves the formula's curve up or down.
    """
    points = rising(measured)
    (low, low_us), (high, high_us) = points[0], points[-1]
    if high >= _APART * max(low, 1.0):
        rate = (high_us - low_us) / (high - low)
        below = [(size, max(low_us - rate * (low - size), 0.0)) for size, _ in formula]
        above = [(size, high_us + rate * (size - high)) for size, _ in formula]
    else:
        said = interpolate(formula, low)
        factor = low_us / said if said > 0 else 1.0
        below = above = [(size, us * factor) for size, us in formula]
    return rising(
        [
            *(point for point in below if point[0] < low),
            *points,
            *(point for point in above if point[0] > high),
        ]
    )
