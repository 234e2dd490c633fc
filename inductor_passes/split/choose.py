"""Choose a region and a number of parts, by what the scheduler would make of the cut graph, of equal layers a few."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from inductor_passes.machine import CostModel
from inductor_passes.records import TriedRecord
from inductor_passes.schedule.graph.schedule import CAP_BYTES, ScheduleGraph
from inductor_passes.schedule.model.limit import limit_us
from inductor_passes.schedule.model.solution import Solution
from inductor_passes.simulate import simulate
from inductor_passes.split.candidates import regions
from inductor_passes.split.cut import Cutter
from inductor_passes.split.fold import Folded, fold
from inductor_passes.split.region import Positions, Region, spread

LEAST_GAIN = 0.03  # of the step, before a graph is cut
NEAR = 0.01  # of the limit: no need to look further
WORTH = 0.5  # of the link time of the region with the most: less is not tried
TRIED = 2  # regions for each number of parts, those of the longest launches
# Nodes of all graphs that are built and scheduled to find out, some 4,000 a second; one is, however large.
MOST_NODES = 9_000


@dataclass(frozen=True, slots=True)
class Trial:
    """A region, and the makespan and limit of the graph cut so, scheduled."""

    region: Region
    makespan_us: float
    limit_us: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The best trial, if any, beside the uncut graph: all scheduled, predicted.

    Times are of ``kept`` of ``layers`` equal layers; ``region`` and ``cap_bytes`` are of the whole graph.
    """

    best: Trial | None
    uncut_us: float
    cap_bytes: int
    limit_us: float
    tried: tuple[TriedRecord, ...] = ()
    region: Region | None = None
    layers: int = 1
    kept: int = 1

    @property
    def gain(self) -> float:
        """Part of the step that the best trial saves."""
        return 1 - self.best.makespan_us / self.uncut_us if self.best and self.uncut_us else 0.0


def choose(
    graph: fx.Graph,
    cost: CostModel,
    scheduler: ScheduleGraph,
    counts: Sequence[int],
    *,
    least_gain: float = LEAST_GAIN,
) -> Choice:
    """Try the regions of the longest launches in each number of parts; the graph stays as it is.

    Nothing is tried where the uncut graph, scheduled, is within ``least_gain`` of the limit.
    """
    folded = fold(graph)
    if folded.graph is graph:
        return _chosen(graph, cost, scheduler, counts, least_gain)
    cap_bytes = give_room(graph, folded, cost, scheduler)
    choice = _chosen(folded.graph, cost, scheduler, counts, least_gain)
    region = None
    if choice.best is not None:
        tried = choice.best.region
        region = spread(Positions(graph), folded.whole[tried.seed], tried.cut, tried.parts)
    return dataclasses.replace(
        choice, region=region, cap_bytes=cap_bytes, layers=folded.layers, kept=folded.kept
    )


def give_room(graph: fx.Graph, folded: Folded, cost: CostModel, scheduler: ScheduleGraph) -> int:
    """Let a folded graph's schedule take as much more memory than its program's order as the whole graph's; return the latter's cap."""
    cap_bytes = scheduler.cap_bytes(graph)
    more = cap_bytes - simulate(graph, cost).peak_bytes
    few = simulate(folded.graph, cost).peak_bytes
    folded.graph.output_node().meta[CAP_BYTES] = few + more
    return cap_bytes


def _chosen(
    graph: fx.Graph,
    cost: CostModel,
    scheduler: ScheduleGraph,
    counts: Sequence[int],
    least_gain: float,
) -> Choice:
    uncut, uncut_us, limit = _scheduled(graph, scheduler)
    found = Choice(None, uncut_us, uncut.cap_bytes, limit)
    if uncut_us * (1 - least_gain) < limit:
        return found
    best: Trial | None = None
    tried: list[TriedRecord] = []
    nodes = len(graph.nodes)
    for parts in counts:
        listed = list(regions(graph, parts))
        link_us = {id(r): sum(map(cost.launch_us, r.launches)) for r in listed}
        listed.sort(key=lambda r: -link_us[id(r)])
        for region in listed[:TRIED]:
            if best is not None and best.makespan_us * (1 - NEAR) < limit:
                break
            if link_us[id(region)] < WORTH * link_us[id(listed[0])]:
                break
            size = len(graph.nodes) + (parts - 1) * len(region.steps)
            if tried and nodes + size > MOST_NODES:
                continue
            nodes += size
            made = cut_copy(graph, region)
            made.output_node().meta[CAP_BYTES] = uncut.cap_bytes
            solution, makespan, its_limit = _scheduled(made, scheduler)
            trial = Trial(region, makespan, its_limit)
            limit = min(limit, its_limit)
            tried.append(
                TriedRecord(
                    parts,
                    region.seed.name,
                    str(region.cut),
                    len(region.launches),
                    trial.makespan_us,
                    solution.peak_bytes,
                )
            )
            fits = solution.within_cap or solution.peak_bytes <= uncut.peak_bytes
            if fits and (best is None or trial.makespan_us < best.makespan_us):
                best = trial
    chosen = best.region if best is not None else None
    return Choice(best, uncut_us, uncut.cap_bytes, limit, tuple(tried), chosen)


def cut_copy(graph: fx.Graph, region: Region) -> fx.Graph:
    """Return a copy of the graph, cut."""
    trial = copy.deepcopy(graph)
    twin = dict(zip(graph.nodes, trial.nodes, strict=True))
    launches = {twin[launch] for launch in region.launches}
    seed = twin[region.seed]
    its = spread(Positions(trial), seed, region.cut, region.parts, launches)
    Cutter(trial, its).run()
    return trial


def _scheduled(graph: fx.Graph, scheduler: ScheduleGraph) -> tuple[Solution, float, float]:
    """The graph's schedule, the makespan of what would be applied of it, and the graph's limit."""
    extracted = scheduler.extract(graph)
    solution, refused = scheduler.plan(graph, extracted)
    makespan = solution.original_makespan_us if refused else solution.makespan_us
    return solution, makespan, limit_us(extracted.problem)
