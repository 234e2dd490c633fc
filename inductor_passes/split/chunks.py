"""The pass that computes collective products in chunks, so that one is multiplied while another is on its way."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from inductor_passes.base import PassContext, PassStats
from inductor_passes.fuse import FUSIONS
from inductor_passes.fuse.base import Fusion
from inductor_passes.graph.collectives import kind, launches
from inductor_passes.graph.numbers import PART
from inductor_passes.graph.source_lines import user_line
from inductor_passes.machine import CostModel
from inductor_passes.schedule.graph.schedule import CAP_BYTES, ScheduleGraph
from inductor_passes.schedule.model.limit import limit_us
from inductor_passes.schedule_options import ScheduleOptions
from inductor_passes.simulate import simulate
from inductor_passes.split.base import Cutting
from inductor_passes.split.choose import give_room
from inductor_passes.split.cut import Cutter
from inductor_passes.split.fold import fold
from inductor_passes.split.products import CollectiveProduct, collective_products
from inductor_passes.split.rules.places import Cut

AUTO = (2, 4)
LEAST_GAIN = 0.03  # of the step, for products that are chunked alike
TRIED = 3  # kinds of collective products, those exposed longest
MOST_NODES = 9_000  # of all graphs that are scheduled to find out; one is, however large


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Collective products that are ``alike`` so are computed in ``parts`` along ``cut``."""

    alike: tuple[object, ...]
    parts: int
    cut: Cut


class ChunkProducts(Cutting):
    """Compute a product and the collective in front of it or behind it in chunks, launches pipelined with products.

    ``all_gather -> product``, ``product -> reduce_scatter`` and ``product -> all_reduce``, with views and casts between, by graph
    alone: a region of one product (``products.py``). Those that are alike, as in the layers of a model, are chunked alike. The number
    of chunks and the dimension are those of the shortest predicted step, scheduled; it must save 3 %. Where a fused kernel can run
    and is predicted to save more, the product is left to it.

    Requires: a functional graph of known sizes.
    Ensures:  what ``SplitRegions`` ensures.
    Stats:    ``products`` (in chunks), ``launches`` (that were cut), ``joins``.
    """

    name = "chunk_products"
    changes_launches = True

    def __init__(
        self,
        cost: CostModel,
        split: int | str = "auto",
        schedule: ScheduleOptions = ScheduleOptions(),
        fusions: Sequence[Fusion] | None = None,
    ) -> None:
        super().__init__()
        self.cost, self.split, self.schedule = cost, split, schedule
        self.fusions = [f(cost) for f in FUSIONS] if fusions is None else fusions

    @classmethod
    def build(cls, context: PassContext) -> ChunkProducts:
        return cls(context.cost, context.split, context.schedule)

    def digest(self) -> str:
        return f"{self.split} {self.schedule} {self.cost.digest()}"

    def run(self, graph: fx.Graph) -> PassStats:
        if any(PART in launch.meta for launch in launches(graph)):
            return PassStats(False, notes=("larger regions were cut",))
        if next(collective_products(graph), None) is None:
            return PassStats(False)
        scheduler = ScheduleGraph(self.cost, self.schedule)
        folded = fold(graph)
        if folded.graph is graph:
            cap = scheduler.peak_and_cap_bytes(graph)[1]
        else:
            cap = give_room(graph, folded, scheduler)
        chosen, notes = self._choose(folded.graph, scheduler)
        if folded.kept < folded.layers:
            notes.append(f"looked at {folded.kept} of {folded.layers} equal layers")
        made = [cutter for chunks in chosen for cutter in self.apply(graph, chunks)]
        if made:
            graph.output_node().meta[CAP_BYTES] = cap
        counters = {
            "products": len(made),
            "launches": sum(len(cutter.made) for cutter in made),
            "joins": sum(cutter.joins for cutter in made),
        }
        return PassStats(bool(made), counters if made else {}, notes=tuple(notes))

    def apply(self, graph: fx.Graph, chunks: _Chunks) -> list[Cutter]:
        """Write chunks into the graph, where they can be."""
        made = []
        named = [p.launch.name for p in collective_products(graph) if p.alike == chunks.alike]
        for name in named:
            its = (p for p in collective_products(graph) if p.launch.name == name)
            product = next(its, None)
            region = product.region(chunks.parts, chunks.cut) if product is not None else None
            if region is not None:
                made.append(self.cut_too(graph, region))
        return made

    def _choose(self, graph: fx.Graph, scheduler: ScheduleGraph) -> tuple[list[_Chunks], list[str]]:
        """What to chunk, one kind of collective product after the other, and a line about each."""
        current = graph
        extracted = scheduler.extract(graph)
        solution, refused = scheduler.plan(graph, extracted)
        now_us = solution.original_makespan_us if refused else solution.makespan_us
        cap, peak = solution.cap_bytes, solution.peak_bytes
        limit = limit_us(extracted.problem)
        exposed = {
            extracted.nodes[item.launch].name: item.us  # type: ignore[union-attr]
            for item in solution.reasons
        }
        if refused:
            exposed = dict(simulate(graph, self.cost).exposed_by_launch)
        chosen: list[_Chunks] = []
        notes: list[str] = []
        nodes = 0
        counts = (self.split,) if isinstance(self.split, int) else AUTO
        for alike in _kinds(graph, exposed):
            first = alike[0]
            names = tuple(product.launch.name for product in alike)
            waits_us = sum(exposed.get(name, 0.0) for name in names)
            if waits_us < LEAST_GAIN * now_us or now_us * (1 - LEAST_GAIN) < limit:
                continue
            best, best_us, best_graph = None, math.inf, current
            for parts in counts:
                for _, cut in first.seeds:
                    size = len(current.nodes) + parts * sum(len(p.nodes) for p in alike)
                    if nodes and nodes + size > MOST_NODES:
                        continue
                    trial = copy.deepcopy(current)
                    chunks = _Chunks(first.alike, parts, cut)
                    if not self.tried(trial, chunks, len(alike)):
                        continue
                    nodes += size
                    trial.output_node().meta[CAP_BYTES] = cap
                    found, no = scheduler.plan(trial, scheduler.extract(trial))
                    took = found.original_makespan_us if no else found.makespan_us
                    fits = found.within_cap or found.peak_bytes <= peak
                    if fits and took < best_us:
                        best, best_us, best_graph = chunks, took, trial
            fused_us = now_us - self._saved_by_kernels(alike, exposed)
            where = f"{len(alike)} x {kind(first.launch)} and its product"
            where += f" ({user_line(first.launch)})" if user_line(first.launch) else ""
            times = f"{now_us:.0f} us whole"
            times += f", {best_us:.0f} in chunks" if best is not None else ", no chunks fit"
            if fused_us < now_us and fused_us <= best_us:
                notes.append(f"{where}: left to a fused kernel; {times}, {fused_us:.0f} fused")
            elif best is None or best_us > now_us * (1 - LEAST_GAIN):
                notes.append(f"{where}: left whole; {times}")
            else:
                chosen.append(best)
                notes.append(f"{where}: {best.parts} chunks along {best.cut}; {times}")
                current, now_us = best_graph, best_us
        return chosen, notes

    def tried(self, trial: fx.Graph, chunks: _Chunks, count: int) -> bool:
        """Write chunks into a graph on trial; return whether all of its ``count`` products could be."""
        other = type(self)(self.cost, self.split, self.schedule, self.fusions)
        return len(other.apply(trial, chunks)) == count

    def _saved_by_kernels(
        self, alike: Sequence[CollectiveProduct], exposed: dict[str, float]
    ) -> float:
        """Time that fused kernels would save in these products, by their own predictions; 0 where none can run."""
        saved = 0.0
        for product in alike:
            offers = [
                f.predicted(product.launch, exposed.get(product.launch.name, 0.0))
                for f in self.fusions
                if f.collective == kind(product.launch)
            ]
            pays = [o.unfused_us - o.fused_us for o in offers if o is not None and o.pays]
            saved += max(pays, default=0.0)
        return saved


def _kinds(graph: fx.Graph, exposed: dict[str, float]) -> list[list[CollectiveProduct]]:
    """Collective products by kind, those that are exposed longest first."""
    found: dict[object, list[CollectiveProduct]] = {}
    for product in collective_products(graph):
        found.setdefault(product.alike, []).append(product)

    def us(alike: list[CollectiveProduct]) -> float:
        return sum(exposed.get(product.launch.name, 0.0) for product in alike)

    return sorted(found.values(), key=us, reverse=True)[:TRIED]
