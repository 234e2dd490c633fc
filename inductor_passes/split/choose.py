"""Choose regions and their numbers of parts, by what the scheduler would make of the cut graph,
of equal layers a few.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.graph.collectives import is_launch
from inductor_passes.graph.edit import Values
from inductor_passes.records import TriedRecord
from inductor_passes.schedule.schedule_pass import CAP_BYTES, ScheduleGraph
from inductor_passes.simulate import simulate
from inductor_passes.split.candidates import Laid, Way, from_inputs, from_inside, lay, like
from inductor_passes.split.cut import cut_all
from inductor_passes.split.price import BACKWARD, FORWARD, Folded, Price, Prices, fold
from inductor_passes.split.region import Region
from inductor_passes.split.rules.rule import Cut

LEAST_GAIN = 0.03  # of the step, before a graph is cut
LEAST_MORE = 0.01  # of the step, for each region behind the first, or for halves in unlike parts
NEAR = 0.01  # of the limit: no need to look further
WORTH = 0.5  # of the link time of the region with the most: less is not tried
TRIED = 2  # regions for each number of parts, those of the longest launches
MOST_KINDS = 4  # of regions in one graph
# Nodes of all graphs that are built and scheduled to find out, some 4,000 a second; one is, however
# large.
MOST_NODES = 9_000


@dataclass(frozen=True, slots=True)
class Trial:
    """All ways that a graph is cut in at once, the graph cut so, and its price."""

    ways: tuple[Way, ...]
    graph: fx.Graph
    price: Price


@dataclass(frozen=True, slots=True)
class Chosen:
    """One way that was chosen, its regions in the whole graph, and the predicted step before it
    was and after.
    """

    way: Way
    regions: tuple[Region, ...]
    before_us: float
    after_us: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The best trial, if any, beside the uncut graph: all scheduled, predicted.

    Times are of ``kept`` of ``layers`` equal layers; ``steps`` and ``cap_bytes`` are of the whole
    graph.
    """

    best: Trial | None
    uncut_us: float
    cap_bytes: int
    limit_us: float
    tried: tuple[TriedRecord, ...] = ()
    steps: tuple[Chosen, ...] = ()
    layers: int = 1
    kept: int = 1
    exposed_us: float = 0.0  # compute waits so long for the launches of one way to cut, at most

    @property
    def gain(self) -> float:
        """Part of the step that the best trial saves."""
        return 1 - self.best.price.step_us / self.uncut_us if self.best and self.uncut_us else 0.0

    @property
    def regions(self) -> list[Region]:
        """All regions, in the order in which they were chosen."""
        return [region for step in self.steps for region in step.regions]


def choose(
    graph: fx.Graph,
    scheduler: ScheduleGraph,
    counts: Sequence[int],
    *,
    least_gain: float = LEAST_GAIN,
    values: Values | None = None,
) -> Choice:
    """Try the regions of the longest launches in each number of parts, and others beside the best;
    the graph stays as it is.

    ``least_gain``: share of the step that a cut must save; 0: one is made if any can be. Nothing is
    tried where the uncut graph, scheduled, is within it of the limit. ``values``: fake values that
    cuts of the graph share.
    """
    folded = fold(graph)
    prices = Prices(graph, folded, scheduler)
    search = _Search(folded.graph, prices, scheduler.cost, counts, least_gain, values)
    found = search.run()
    steps: list[Chosen] = []
    if found:
        before_us = prices.uncut.step_us
        laid = lay(graph, found[-1].ways)
        for way, after_us, its in zip(found[-1].ways, _afters(found), laid, strict=True):
            steps.append(Chosen(way, tuple(its), before_us, after_us))
            before_us = after_us
    return Choice(
        found[-1] if found else None,
        prices.uncut.step_us,
        prices.cap_bytes,
        search.limit_us,
        tuple(search.tried),
        tuple(steps),
        folded.layers,
        folded.kept,
        search.exposed_us,
    )


def _afters(found: Sequence[Trial]) -> Iterator[float]:
    """The predicted step with each way and those before it; ways that were chosen together share
    it.
    """
    for i, trial in enumerate(found):
        new = len(trial.ways) - (len(found[i - 1].ways) if i else 0)
        yield from [trial.price.step_us] * new


class _Search:
    """Greedy: one way to cut after the other, each the best beside those before it."""

    def __init__(
        self,
        graph: fx.Graph,
        prices: Prices,
        cost: CostModel,
        counts: Sequence[int],
        least_gain: float,
        values: Values | None,
    ) -> None:
        self.graph, self.prices, self.cost = graph, prices, cost
        self.counts, self.least_gain = counts, least_gain
        self._values = Values() if values is None else values
        self.limit_us = prices.uncut.limit_us
        self.tried: list[TriedRecord] = []
        self.exposed_us = 0.0  # for launches of one way, the longest
        self._front: dict[int, list[Region]] = {}
        self._launches = {node.name for node in graph.nodes if is_launch(node)}
        self._nodes = len(graph.nodes)

    def run(self) -> list[Trial]:
        """Return the best trial of one way, that of another beside it, and so on."""
        uncut = self.prices.uncut
        if uncut.step_us * (1 - self.least_gain) < self.limit_us:
            return []
        found: list[Trial] = []
        while len(found[-1].ways if found else ()) < MOST_KINDS:
            best = self._next(found[-1] if found else None)
            if best is None:
                break
            found.append(best)
            if found[0].price.step_us > uncut.step_us * (1 - self.least_gain) or self._is_near(
                best
            ):
                break
        return found

    def _is_near(self, trial: Trial | None) -> bool:
        return trial is not None and trial.price.step_us * (1 - NEAR) < self.limit_us

    def _next(self, beside: Trial | None) -> Trial | None:
        now = self.prices.uncut if beside is None else beside.price
        least = self.least_gain if beside is None else LEAST_MORE
        if beside is not None and self._left_us(beside.price) < least * now.step_us:
            return None
        trials: list[Trial] = []
        poor: set[tuple[object, Cut]] = set()
        for parts in self.counts:
            listed = self._listed(parts, beside)
            self.exposed_us = max([self.exposed_us, *(exposed for _, _, exposed in listed)])
            for way, link_us, exposed_us in listed[:TRIED]:
                best = min(trials, key=_step_us, default=None)
                if self._is_near(best) or link_us < WORTH * listed[0][1]:
                    break
                # A cut hides no more than what its launches keep waiting.
                if exposed_us < least * now.step_us or (way.seed, way.cut) in poor:
                    continue
                if (trial := self._tried(beside, (way,))) is not None:
                    trials.append(trial)
            # What another way beats in few parts is not tried in more, and nothing is where none
            # gains.
            best_us = min(map(_step_us, trials), default=math.inf)
            if len(now.us) < 2 and trials and best_us > now.step_us:
                break
            far = (trial.ways[-1] for trial in trials if _step_us(trial) > best_us * (1 + NEAR))
            poor = {(way.seed, way.cut) for way in far} if len(now.us) < 2 else poor
        if beside is None and len(self.counts) > 1:
            trials += self._halves_apart(trials)
        fitting = [trial for trial in trials if trial.price.fits(self.prices.uncut)]
        best = min(fitting, key=_step_us, default=None)
        if best is None:
            return None
        # Trials are priced without a look at their buckets in the graph, which is the slow part:
        # only the best is priced in full.
        best = replace(best, price=self.prices.of(best.graph))
        if beside is None:
            return best
        more = now.step_us - best.price.step_us
        return best if more >= LEAST_MORE * self.prices.uncut.step_us else None

    def _left_us(self, now: Price) -> float:
        """How long compute waits for launches that are whole."""
        return sum(us for name, us in now.exposed.items() if name in self._launches)

    def _listed(self, parts: int, beside: Trial | None) -> list[tuple[Way, float, float]]:
        """Ways, their launches' link time and how long compute waits for those, by link time."""
        now = self.prices.uncut if beside is None else beside.price
        laid_out = Laid(self.graph)
        for way in () if beside is None else beside.ways:
            laid_out.lay(way)
        if parts not in self._front:
            self._front[parts] = list(from_inputs(self.graph, parts))
        front = self._front[parts]
        every = [region for region in front if region.launches]
        every += from_inside(self.graph, parts, front, laid_out.taken)
        found = []
        for region in every:
            way = Way(like(region.seed), region.cut, parts)
            inside = region.seed.op != "placeholder"
            its = laid_out.lay(way, keep=False) if inside or laid_out.taken else [region]
            launches = [launch for each in its for launch in each.launches]
            if launches:
                link_us = sum(map(self.cost.launch_us, launches))
                exposed_us = sum(now.exposed.get(launch.name, 0.0) for launch in launches)
                found.append((way, link_us, exposed_us))
        return sorted(found, key=lambda each: -each[1])

    def _tried(self, beside: Trial | None, more: tuple[Way, ...]) -> Trial | None:
        """The price of some ways beside others; None where too much was tried."""
        ways = (*(beside.ways if beside is not None else ()), *more)
        made = copy.deepcopy(self.graph)
        laid = lay(made, ways)
        chosen = [region for of_way in laid for region in of_way]
        size = len(self.graph.nodes) + sum((r.parts - 1) * len(r.steps) for r in chosen)
        # A count of nodes and not a clock: all ranks must stop at the same trial.
        if self.tried and self._nodes + size > MOST_NODES:
            return None
        self._nodes += size
        cut_all(made, chosen, values=self._values)
        price = self.prices.of(made, sure=False)
        self.limit_us = min(self.limit_us, price.limit_us)
        self.tried += [
            TriedRecord(
                way.parts,
                its[0].seed.name,
                str(way.cut),
                sum(len(region.launches) for region in its),
                price.step_us,
                max(price.peak_bytes),
                way.half,
            )
            for way, its in zip(ways[-len(more) :], laid[-len(more) :], strict=True)
            if its
        ]
        return Trial(ways, made, price)

    def _halves_apart(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return a trial that cuts forward and backward differently, if their prices favour it.

        One half of the joint graph may stay whole. The list is empty where the prices of the halves
        predict too little gain.
        """
        uncut = self.prices.uncut
        if len(uncut.us) < 2 or not trials:
            return []
        whole = Trial((), self.graph, uncut)
        forward = min((whole, *trials), key=lambda trial: trial.price.us[0])
        backward = min((whole, *trials), key=lambda trial: trial.price.us[1])
        best_us = min(trial.price.step_us for trial in (whole, *trials))
        apart_us = forward.price.us[0] + backward.price.us[1]
        if forward is backward or best_us - apart_us < LEAST_MORE * uncut.step_us:
            return []
        ways = [replace(way, half=FORWARD) for way in forward.ways]
        ways += [replace(way, half=BACKWARD) for way in backward.ways]
        trial = self._tried(None, tuple(ways))
        return [] if trial is None else [trial]


def _step_us(trial: Trial) -> float:
    return trial.price.step_us


def give_room(graph: fx.Graph, folded: Folded, scheduler: ScheduleGraph) -> int:
    """Let a folded graph's schedule take as much more memory than its program's order as the
    whole graph's; return the latter's cap.
    """
    peak, cap_bytes = scheduler.peak_and_cap_bytes(graph)
    few = simulate(folded.graph, scheduler.cost).peak_bytes
    folded.graph.output_node().meta[CAP_BYTES] = few + cap_bytes - peak
    return cap_bytes
