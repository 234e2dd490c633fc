"""The portfolio at work: drafts by every rule, then better latest starts from the best of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from inductor_passes.schedule.model.own_bound import Certificate
from inductor_passes.schedule.model.tasks import Tasks
from inductor_passes.schedule.solver.bucket import Merger
from inductor_passes.schedule.solver.collect import Enough, enough_for, link_us_in_buckets
from inductor_passes.schedule.solver.draft import Draft, Limits
from inductor_passes.schedule.solver.justify import latest_starts
from inductor_passes.schedule.solver.list_schedule import list_schedule
from inductor_passes.schedule.solver.live_memory import RiseAhead
from inductor_passes.schedule.solver.rules import PORTFOLIO, Rules

IMPROVED, ROUNDS = 1, 2  # how many of the best drafts are improved in each way, and how often each
BACKWARDS, URGED = "backwards", "urged"
BETTER = BACKWARDS, URGED  # in which ways latest starts are improved
WAYS = 3  # that are followed of a problem that is alike
SLIMMED = 4  # how many drafts that are too large are tried again

ROUNDING = 1e-9  # times are summed in another order than they pass
URGE = 2.0  # by how much of the time lost a launch moves ahead


@dataclass(frozen=True, slots=True)
class Found:
    """A draft and what led to it: latest starts by ``rules``, then better ones, each ``how`` of the draft before."""

    draft: Draft
    latest: list[float]
    rules: Rules
    how: tuple[str, ...] = ()


class Search:
    """Everything that is computed once a problem, and the drafts found so far."""

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
        """``kept``: how many of the best drafts are asked for; one that cannot be among them is given up.
        ``busy_scale_us``: what channels are busy for is part of that time, where not of ``scale_us``.
        ``least``: no draft is shorter; the search ends with one that is as short.
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
        """Fill ``found``: a few drafts more where launches are held back, the same number otherwise."""
        for rules in PORTFOLIO:
            if self._is_done():
                return
            if not rules.busy or self._enough_by(rules):
                self.draft_by(rules, self._worth_us())
        self._slim()
        for how in BETTER:
            for found in self.best(IMPROVED):
                if self._is_done():
                    return
                for _ in range(ROUNDS - 1):
                    found = self._better(found, how)
                self._better(found, how, worth_us=self._worth_us())

    def follow(self, ways: Iterable[Found]) -> None:
        """Fill ``found`` by what led to the best drafts of a problem that is alike; as ``run`` does if none of them fits."""
        left = WAYS
        for way in ways:
            if self._is_done() or not left:
                break
            left -= 1
            worth_us = math.inf if way.how else self._worth_us()
            found = self.draft_by(way.rules, worth_us)
            for how in way.how:
                found = self._better(found, how)
        if not any(found.draft.peak_bytes <= self.cap_bytes for found in self.found):
            self.run()

    def _is_done(self) -> bool:
        best = [found.draft for found in self.best(1)]
        return any(
            draft.peak_bytes <= self.cap_bytes
            and draft.makespan_us <= self._least.us * (1 + ROUNDING)
            for draft in best
        )

    def _worth_us(self) -> float:
        """Makespan of the last draft that is kept; what is longer is not even one of the best."""
        best = [found.draft for found in self.best(self._kept)]
        if len(best) < self._kept or best[-1].peak_bytes > self.cap_bytes:
            return math.inf
        return best[-1].makespan_us * (1 + ROUNDING)

    def _slim(self) -> None:
        """Try again, with less memory, the shortest drafts that missed the cap but beat all within it."""
        best = self.best(1)[0].draft.makespan_us
        over = [f for f in self.found if f.draft.peak_bytes > self.cap_bytes]
        # Drafts of one length are most often the same.
        short = {f.draft.makespan_us: f for f in over if f.draft.makespan_us < best}
        for _, found in sorted(short.items())[:SLIMMED]:
            limit = self.cap_bytes
            for _ in range(ROUNDS):
                limit -= max(0, found.draft.peak_bytes - self.cap_bytes)
                found = self._draft(found.rules, found.latest, found.how, limit)
                if found.draft.peak_bytes <= self.cap_bytes:
                    break

    def _urged(self, found: Found) -> list[float]:
        """The latest starts of a draft, with the launches that held it up moved ahead."""
        latest = list(found.latest)
        for t, us in found.draft.stalls.items():
            latest[t] -= URGE * us
        return latest

    def best(self, count: int) -> list[Found]:
        """The shortest drafts within the cap; behind them, the leanest of the others."""

        def rank(found: Found) -> tuple[int, float]:
            over = max(0, found.draft.peak_bytes - self.cap_bytes)
            return over, found.draft.makespan_us

        return sorted(self.found, key=rank)[:count]

    def draft_by(self, rules: Rules, worth_us: float = math.inf) -> Found:
        """One more draft, by rules alone; it is given up once it takes longer than ``worth_us``."""
        return self._draft(rules, self._latest_by(rules), worth_us=worth_us)

    def _better(self, found: Found, how: str, worth_us: float = math.inf) -> Found:
        latest = self.latest_from(found) if how == BACKWARDS else self._urged(found)
        return self._draft(found.rules, latest, (*found.how, how), worth_us=worth_us)

    def _draft(
        self,
        rules: Rules,
        latest: list[float],
        how: tuple[str, ...] = (),
        cap_bytes: int | None = None,
        worth_us: float = math.inf,
    ) -> Found:
        rules = rules if self._merges else replace(rules, merge=0.0)
        horizon = rules.rise_ahead * self._scale_us
        if horizon not in self._rises:
            self._rises[horizon] = self._ahead.within(horizon)
        cap_bytes = self.cap_bytes if cap_bytes is None else cap_bytes
        rises, enough = self._rises[horizon], self._enough_by(rules)
        limits = Limits(cap_bytes, rises, self._scale_us, enough, worth_us, self._least.tail)
        draft = list_schedule(self.tasks, self._merger, latest, limits, rules)
        found = Found(draft, latest, rules, how)
        if draft.makespan_us < math.inf:
            self.found.append(found)
        return found

    def latest_from(self, found: Found) -> list[float]:
        """Latest starts of a draft run backwards."""
        link_us = link_us_in_buckets(self.tasks, self._merger, self._enough_by(found.rules))
        return latest_starts(self.tasks, found.draft.finish, link_us)

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
