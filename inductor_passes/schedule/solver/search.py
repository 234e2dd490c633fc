"""Search a portfolio of candidate schedules: every rule once, then better latest starts from the
best.

Scheduling forwards by latest start, then backwards by latest finish, and again, is the
forward-backward improvement of project scheduling (Li and Willis, European Journal of Operational
Research 56, 1992; Valls, Ballestin and Quintanilla, ibid. 165, 2005).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush

from inductor_passes.schedule.solver.bucketing import Enough, Merger, enough_for, link_us_in_buckets
from inductor_passes.schedule.solver.list_scheduler import (
    PORTFOLIO,
    Candidate,
    Limits,
    Rules,
    list_schedule,
)
from inductor_passes.schedule.solver.live_memory import RiseAhead
from inductor_passes.schedule.solver.lower_bound import Certificate, lower_bound, own_bound
from inductor_passes.schedule.solver.problem import Problem
from inductor_passes.schedule.solver.tasks import Tasks


def latest_starts(tasks: Tasks, finish: Sequence[float], link_us: Sequence[float]) -> list[float]:
    """Per task, the latest start (us) in a schedule that ends when the backward run does.

    The backward run lets the task with the largest ``finish`` go first; any increasing measure of
    progress will do. One machine for compute and one per group, on which a launch takes
    ``link_us``; no buckets, no memory. n log n.
    """
    # A launch task may hold some cheap compute of its own, which counts with its link time here:
    # one machine a task keeps the backward run simple, and the error is a few microseconds.
    duration = [us + link for us, link in zip(tasks.us, link_us, strict=True)]
    names = {name: m for m, name in enumerate(dict.fromkeys(tasks.group))}
    machine = [names[name] for name in tasks.group]
    waiting: list[list[tuple[float, int]]] = [[] for _ in names]
    busy = [False] * len(names)
    # The graph is read backwards: what has no successors may run first, and the predecessors
    # follow.
    missing = [len(after) for after in tasks.succs]
    end = [0.0] * tasks.count
    running: list[tuple[float, int]] = []
    now = 0.0

    def finished(t: int) -> None:
        # A stack and not recursion: chains of tasks that take no time may be thousands long.
        stack = [t]
        while stack:
            done = stack.pop()
            end[done] = now
            for p in tasks.preds[done]:
                missing[p] -= 1
                if not missing[p]:
                    available(p, stack)

    def available(t: int, stack: list[int]) -> None:
        if duration[t]:
            # The task that ends last in the measure goes first backwards. Ties go by number, never
            # by hash order, because all ranks must find one order.
            heappush(waiting[machine[t]], (-finish[t], t))
        else:
            stack.append(t)

    for t in range(tasks.count):
        if not tasks.succs[t]:
            free: list[int] = []
            available(t, free)
            for done in free:
                finished(done)
    while True:
        for m, queue in enumerate(waiting):
            if queue and not busy[m]:
                t = heappop(queue)[1]
                busy[m] = True
                heappush(running, (now + duration[t], t))
        if not running:
            # Times were counted from the end: turned around, they are latest starts from the begin
            # of a schedule of length ``now``.
            return [now - at for at in end]
        now = running[0][0]
        while running and running[0][0] <= now:
            t = heappop(running)[1]
            busy[machine[t]] = False
            finished(t)


IMPROVED, ROUNDS = (
    1,
    2,
)  # how many of the best candidates are improved in each way, and how often each
BACKWARDS, URGED = "backwards", "urged"
BETTER = BACKWARDS, URGED  # in which ways latest starts are improved
# The few ways to the best candidates of the folded problem carry over; more of them cost the time
# that folding saves.
WAYS = 3  # that are followed of a problem that is alike
SLIMMED = 4  # how many candidates that are too large are tried again

# A relative margin, or a candidate at the bound would be given up for the last bit of a float.
ROUNDING = 1e-9  # times are summed in another order than they pass
URGE = 2.0  # by how much of the time lost a launch moves ahead


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate and what led to it: latest starts by ``rules``, then better ones, each ``how`` of
    the candidate before.
    """

    candidate: Candidate
    latest: list[float]
    rules: Rules
    how: tuple[str, ...] = ()


class Search:
    """Everything that is computed once a problem, and the candidates found so far."""

    def __init__(
        self,
        tasks: Tasks,
        cap_bytes: int,
        scale_us: float,
        merges: bool,
        kept: int = IMPROVED,
        least: Certificate | None = None,
        busy_scale_us: float | None = None,
    ) -> None:
        """``kept``: how many of the best candidates are asked for; one that cannot be among them is
        given up.
        ``busy_scale_us``: what channels are busy for is part of that time, where not of
            ``scale_us``.
        ``least``: no candidate is shorter; the search ends with one that is as short.
        """
        self.tasks = tasks
        self.cap_bytes = cap_bytes
        self._scale_us = scale_us
        self._busy_scale_us = scale_us if busy_scale_us is None else busy_scale_us
        self._merger = Merger(tasks)
        self._ahead = RiseAhead(tasks)
        self._rises: dict[float, list[int]] = {}
        self._latest: dict[tuple[str, float], list[float]] = {}
        self._enough: dict[float, Enough] = {}
        self._merges, self._kept = merges, kept
        self._least = least or Certificate(0.0, "", (), (0.0,) * tasks.count)
        self.found: list[Found] = []

    def run(self) -> None:
        """Fill ``found``: a few candidates more where launches are held back, the same number
        otherwise.
        """
        for rules in PORTFOLIO:
            if self._is_done():
                return
            # A rule that holds launches back is the same as another one where no channel is worth
            # holding back: the candidate would be found twice.
            if not rules.busy or self._enough_by(rules):
                self.candidate_by(rules, self._worth_us())
        self._slim()
        for how in BETTER:
            # Each way starts from the best candidate so far: the second improves what the first has
            # found.
            for found in self.best(IMPROVED):
                if self._is_done():
                    return
                for _ in range(ROUNDS - 1):
                    found = self._better(found, how)
                self._better(found, how, worth_us=self._worth_us())

    def follow(self, ways: Iterable[Found]) -> None:
        """Fill ``found`` by the ways to the best candidate schedules of a similar problem.

        Do as ``run`` does if no result fits the memory budget.
        """
        left = WAYS
        for way in ways:
            if self._is_done() or not left:
                break
            left -= 1
            # The first candidate is only the parent where improvements follow, so it must be
            # complete: they need its finish times.
            worth_us = math.inf if way.how else self._worth_us()
            found = self.candidate_by(way.rules, worth_us)
            for how in way.how:
                found = self._better(found, how)
        # The folded problem has fewer layers in memory at once: a way that fits there may not fit
        # the whole.
        if not any(found.candidate.peak_bytes <= self.cap_bytes for found in self.found):
            self.run()

    def _is_done(self) -> bool:
        best = [found.candidate for found in self.best(1)]
        return any(
            candidate.peak_bytes <= self.cap_bytes
            and candidate.makespan_us <= self._least.us * (1 + ROUNDING)
            for candidate in best
        )

    def _worth_us(self) -> float:
        """Makespan of the last candidate that is kept; a longer one is none of the best."""
        best = [found.candidate for found in self.best(self._kept)]
        # A candidate over the budget is no measure of time: a slower one that fits is worth more.
        if len(best) < self._kept or best[-1].peak_bytes > self.cap_bytes:
            return math.inf
        return best[-1].makespan_us * (1 + ROUNDING)

    def _slim(self) -> None:
        """Try again, with less memory, the shortest candidates that missed the cap but beat all
        within it.
        """
        best = self.best(1)[0].candidate.makespan_us
        over = [f for f in self.found if f.candidate.peak_bytes > self.cap_bytes]
        # Drafts of one length are most often the same.
        short = {f.candidate.makespan_us: f for f in over if f.candidate.makespan_us < best}
        for _, found in sorted(short.items())[:SLIMMED]:
            limit = self.cap_bytes
            for _ in range(ROUNDS):
                # The scheduler may exceed its limit where nothing else can run. Asking for less by
                # the excess most often brings the peak under the budget.
                limit -= max(0, found.candidate.peak_bytes - self.cap_bytes)
                found = self._candidate(found.rules, found.latest, found.how, limit)
                if found.candidate.peak_bytes <= self.cap_bytes:
                    break

    def _urged(self, found: Found) -> list[float]:
        """The latest starts of a candidate, with the launches that held it up moved ahead."""
        latest = list(found.latest)
        for t, us in found.candidate.stalls.items():
            # Moved by more than was lost: the launch has to pass others in its queue, whose latest
            # starts lie close together.
            latest[t] -= URGE * us
        return latest

    def best(self, count: int) -> list[Found]:
        """Return the shortest candidates in the memory budget; after them, the leanest others."""

        def rank(found: Found) -> tuple[int, float]:
            # Within the budget less memory is worth nothing; above it memory comes before time.
            over = max(0, found.candidate.peak_bytes - self.cap_bytes)
            return over, found.candidate.makespan_us

        return sorted(self.found, key=rank)[:count]

    def candidate_by(self, rules: Rules, worth_us: float = math.inf) -> Found:
        """One more candidate, by rules alone; given up once it takes longer than ``worth_us``."""
        return self._candidate(rules, self._latest_by(rules), worth_us=worth_us)

    def _better(self, found: Found, how: str, worth_us: float = math.inf) -> Found:
        latest = self.latest_from(found) if how == BACKWARDS else self._urged(found)
        return self._candidate(found.rules, latest, (*found.how, how), worth_us=worth_us)

    def _candidate(
        self,
        rules: Rules,
        latest: list[float],
        how: tuple[str, ...] = (),
        cap_bytes: int | None = None,
        worth_us: float = math.inf,
    ) -> Found:
        # One portfolio serves both: without merging, a few of its rules find the same candidate
        # twice.
        rules = rules if self._merges else replace(rules, merge=0.0)
        horizon = rules.rise_ahead * self._scale_us
        if horizon not in self._rises:
            self._rises[horizon] = self._ahead.within(horizon)
        cap_bytes = self.cap_bytes if cap_bytes is None else cap_bytes
        rises, enough = self._rises[horizon], self._enough_by(rules)
        limits = Limits(cap_bytes, rises, self._scale_us, enough, worth_us, self._least.tail)
        candidate = list_schedule(self.tasks, self._merger, latest, limits, rules)
        found = Found(candidate, latest, rules, how)
        # One that was given up has neither steps nor finish times.
        if candidate.makespan_us < math.inf:
            self.found.append(found)
        return found

    def latest_from(self, found: Found) -> list[float]:
        """Latest starts of a candidate run backwards."""
        link_us = link_us_in_buckets(self.tasks, self._merger, self._enough_by(found.rules))
        return latest_starts(self.tasks, found.candidate.finish, link_us)

    def _latest_by(self, rules: Rules) -> list[float]:
        key = rules.priority, rules.busy
        if key not in self._latest:
            link_us = link_us_in_buckets(self.tasks, self._merger, self._enough_by(rules))
            self._latest[key] = latest_starts(self.tasks, self._measure(rules.priority), link_us)
        return self._latest[key]

    def _enough_by(self, rules: Rules) -> Enough:
        if not (rules.merge and rules.busy and self._merges):
            return {}
        if rules.busy not in self._enough:
            self._enough[rules.busy] = enough_for(
                self.tasks, self._merger, rules.busy * self._busy_scale_us
            )
        return self._enough[rules.busy]

    def _measure(self, priority: str) -> list[float]:
        """Progress of each task through the program, 0 to 1 or so."""
        tasks = self.tasks
        if priority == "program":
            return [t / tasks.count for t in range(tasks.count)]
        head = [0.0] * tasks.count
        for t in range(tasks.count):
            for p in tasks.preds[t]:
                head[t] = max(head[t], head[p] + tasks.us[p] + tasks.link_us[p])
        longest = max(head, default=0.0) or 1.0
        if priority == "path":
            return [h / longest for h in head]
        return [h / longest + t / tasks.count for t, h in enumerate(head)]


def search_folded(
    few: Problem, shrunk: float, extra_bytes: int, scale_us: float, merges: bool
) -> list[Found]:
    """Search on ``few``, a problem folded, and return what led to its candidates, best first.

    In front stands the best of those that keep to the cap on the whole even if they take more
    memory with each layer.
    ``shrunk``: how many times as many nodes the whole has.

    ``extra_bytes``: above the peak of the program's own order. ``scale_us``: of the whole, so that
        a rule that looks some time ahead looks as far; how busy a channel may be is part of the few
        layers' own time.
    """
    tasks = Tasks(few)
    least = own_bound(tasks)
    # The budget of the few layers: their own peak and the same extra bytes, so that a rule has as
    # much to play with as on the whole.
    peak = RiseAhead(tasks).peak
    search = Search(
        tasks,
        peak + extra_bytes,
        scale_us,
        merges,
        least=least,
        busy_scale_us=lower_bound(few).us,
    )
    search.run()
    ways: dict[object, Found] = {}
    for found in search.best(len(search.found)):
        ways.setdefault((found.rules, found.how), found)
    # What a candidate takes above the peak may grow with each layer, as gathers ahead of time do.
    # One that fits even then goes first, because at least one way has to fit the whole.
    lean = (f for f in ways.values() if (f.candidate.peak_bytes - peak) * shrunk <= extra_bytes)
    first = list(itertools.islice(lean, 1))
    return first + [found for found in ways.values() if found not in first]
