"""Find what to keep of a forward at a price of memory: a minimum cut.

Each value that a backward reads is kept, or computed again from values that are themselves kept or
computed again, down to inputs of the graph. With a price for each byte that is kept and the time of
each node that runs again, the cheapest choice is a minimum cut. A node is two vertices, joined by
an edge that costs its bytes. The source reaches the first vertex by an edge that costs its time.
The second one leads to whatever reads it, and to the sink where a backward does.

A minimum cut at a price is also a lower bound (Lagrangian relaxation): no choice within the budget
takes less than the cut's worth minus the price of the budget.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# Capacities are whole numbers of 32 bits in SciPy: those that are finite add up to this at most.
_MOST = 2**30
_INFINITE = 2**30 + 1


@dataclass(frozen=True, slots=True)
class Value:
    """One node of a forward.

    ``sources``: earlier nodes that it reads, by place; inputs of the graph are left out.
    ``bytes``: what keeping it takes, None where it cannot be kept. ``us``: what running it again
    takes, by the channel that it runs on; None where it may not run again. ``read``: whether a
    backward reads it.
    """

    sources: tuple[int, ...]
    bytes: int | None
    us: Mapping[str, float] | None
    read: bool


@dataclass(frozen=True, slots=True)
class MinimumCut:
    """``kept``, ``again``: places of values. ``us``: time of what runs again, by channel."""

    kept: frozenset[int]
    again: frozenset[int]
    bytes: int
    us: Mapping[str, float]

    def worth(self, weights: Mapping[str, float], byte_us: float) -> float:
        """Return what the choice costs, in microseconds."""
        return sum(weights[name] * us for name, us in self.us.items()) + byte_us * self.bytes


def cheapest(values: Sequence[Value], weights: Mapping[str, float], byte_us: float) -> MinimumCut:
    """Return the cheapest choice where a byte costs ``byte_us`` and a microsecond of a channel its
    weight. Raises ValueError where a value can neither be kept nor run again.

    The least of several equally cheap cuts counts, so that all ranks find the same.
    """
    # Only a compile with a budget waits for SciPy's import.
    from scipy.sparse import csr_array  # type: ignore[import-untyped]
    from scipy.sparse.csgraph import (  # type: ignore[import-untyped]
        breadth_first_order,
        maximum_flow,
    )

    count = len(values)
    source, sink = 2 * count, 2 * count + 1
    rows: list[int] = []
    columns: list[int] = []
    prices: list[float] = []

    def join(start: int, end: int, price: float | None) -> None:
        rows.append(start)
        columns.append(end)
        prices.append(-1.0 if price is None else price)

    for i, value in enumerate(values):
        again = None if value.us is None else sum(weights[k] * us for k, us in value.us.items())
        join(source, 2 * i, again)
        join(2 * i, 2 * i + 1, None if value.bytes is None else byte_us * value.bytes)
        for each in value.sources:
            join(2 * each + 1, 2 * i, None)
        if value.read:
            join(2 * i + 1, sink, None)
    finite = np.array(prices)
    whole = finite < 0
    total = float(finite[~whole].sum())
    scaled = np.where(whole, _INFINITE, np.floor(finite * ((_MOST - len(prices)) / (total or 1.0))))
    graph = csr_array(
        (scaled.astype(np.int32), (np.array(rows), np.array(columns))), shape=(sink + 1, sink + 1)
    )
    flow = maximum_flow(graph, source, sink)
    if flow.flow_value > _MOST:
        raise ValueError("A value that a backward reads can neither be kept nor computed again.")
    rest = graph - flow.flow
    rest.eliminate_zeros()
    rest.data = np.maximum(rest.data, 0)
    rest.eliminate_zeros()
    reached = np.zeros(sink + 1, dtype=bool)
    reached[breadth_first_order(rest, source, return_predecessors=False)] = True
    return completed(values, {i for i in range(count) if reached[2 * i]})


def _cut_of(values: Sequence[Value], kept: Collection[int], again: Collection[int]) -> MinimumCut:
    """Return a choice with what it costs."""
    us: dict[str, float] = {}
    for i in sorted(again):
        for name, time in (values[i].us or {}).items():
            us[name] = us.get(name, 0.0) + time
    return MinimumCut(
        frozenset(kept), frozenset(again), sum(values[i].bytes or 0 for i in kept), us
    )


def completed(values: Sequence[Value], keepable: Collection[int]) -> MinimumCut:
    """Return the choice that keeps what a backward needs of ``keepable``, and computes the rest
    again.
    """
    kept: set[int] = set()
    again: set[int] = set()
    pending = [i for i, value in enumerate(values) if value.read]
    while pending:
        i = pending.pop()
        if i in kept or i in again:
            continue
        if values[i].us is None or (values[i].bytes is not None and i in keepable):
            kept.add(i)
        else:
            again.add(i)
            pending.extend(values[i].sources)
    return _cut_of(values, kept, again)
