"""The price of a graph that is cut or not: its schedule's step, a joint graph's forward and backward one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from inductor_passes.cost.model import launching_us
from inductor_passes.graph.collectives import is_launch
from inductor_passes.schedule.extract import Extracted
from inductor_passes.schedule.schedule_pass import CAP_BYTES, ScheduleGraph
from inductor_passes.schedule.solver.lower_bound import limit_us
from inductor_passes.split.fold import Folded
from inductor_passes.split.halves import halves


@dataclass(frozen=True, slots=True)
class Price:
    """Predicted of a graph, scheduled; of a joint graph its forward and backward apart, in this order.

    Where launches take processor time of what computes (``launching_us``), ``us`` counts it for each, as though nothing hid it.
    ``exposed``: how long compute waits for launches, by their names.
    """

    us: tuple[float, ...]
    limit_us: float
    peak_bytes: tuple[int, ...]
    cap_bytes: tuple[int, ...]
    exposed: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_us(self) -> float:
        """The makespan of all of it."""
        return sum(self.us)

    def fits(self, uncut: Price) -> bool:
        """Return whether it takes no more memory than it may, or than the uncut graph does."""
        each = zip(self.peak_bytes, self.cap_bytes, uncut.peak_bytes, strict=True)
        return all(peak <= max(cap, was) for peak, cap, was in each)


class Prices:
    """Prices of one graph, cut in one way or another, within the memory that the uncut one may take."""

    def __init__(self, graph: fx.Graph, folded: Folded, scheduler: ScheduleGraph) -> None:
        self.scheduler = scheduler
        self._caps: tuple[int, ...] | None = None
        self.cap_bytes = 0  # of the graph, all its layers, in one piece
        if folded.graph is not graph:
            few = [scheduler.peak_and_cap_bytes(part)[0] for part in halves(folded.graph)]
            rooms = [scheduler.peak_and_cap_bytes(part) for part in halves(graph)]
            self._caps = tuple(
                peak + cap - own for peak, (own, cap) in zip(few, rooms, strict=True)
            )
            self.cap_bytes = max(cap for _, cap in rooms)
        self.uncut = self.of(folded.graph)
        if self._caps is None:
            self._caps = self.uncut.cap_bytes
            self.cap_bytes = max(self._caps)

    def of(self, graph: fx.Graph, sure: bool = True) -> Price:
        """Return the price of the graph, or of a copy of it that was cut; unless ``sure``, buckets are not tried in the graph."""
        us, limit, peaks, caps, exposed = [], 0.0, [], [], {}
        for i, part in enumerate(halves(graph)):
            if self._caps is not None:
                part.output_node().meta[CAP_BYTES] = self._caps[i]
            extracted = self.scheduler.extract(part)
            how = self.scheduler.plan if sure else self.scheduler.forecast
            solution, refused = how(part, extracted)
            makespan_us = solution.original_makespan_us if refused else solution.makespan_us
            merged = () if refused else solution.buckets
            us.append(makespan_us + self._launching_us(extracted, merged))
            limit += limit_us(extracted.problem)
            peaks.append(solution.peak_bytes)
            caps.append(solution.cap_bytes)
            for item in solution.reasons:
                node = extracted.nodes[item.launch]
                if node is not None and is_launch(node):
                    exposed[node.name] = item.us
        return Price(tuple(us), limit, tuple(peaks), tuple(caps), exposed)

    def _launching_us(self, extracted: Extracted, buckets: Sequence[Sequence[int]]) -> float:
        each = launching_us(self.scheduler.cost)
        launches = sum(node.kind == "launch" for node in extracted.problem.nodes)
        return each * (launches - sum(len(bucket) - 1 for bucket in buckets))
