"""Compute that is ready to run: urgent compute first, the rest by the program's order."""

from __future__ import annotations

import math
from collections.abc import Callable
from heapq import heappop, heappush

from inductor_passes.schedule.model.tasks import Tasks
from inductor_passes.schedule.solver.collect import Entry
from inductor_passes.schedule.solver.progress import Progress

TRIED = 16  # tasks looked at for one that fits when memory is short


class ReadyCompute:
    """What the compute stream may run next. Numbers from ``tasks.count`` on are waits: they go first.

    Compute more than ``window`` tasks beyond the frontier is kept back, and so is compute that waits for
    nothing, such as recomputation, until its latest start is at most ``ahead_us`` away.
    """

    def __init__(
        self, tasks: Tasks, latest: list[float], progress: Progress, window: int, ahead_us: float
    ) -> None:
        self._tasks, self._latest, self._progress = tasks, latest, progress
        self._window, self._ahead_us = window, ahead_us
        self._urgent: list[Entry] = []  # with what has been run out of turn
        self._by_age: list[int] = []
        self._too_early: list[Entry] = []
        self._too_far: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._urgent)

    def add(self, number: int) -> None:
        """Compute, or a wait, has all that it depends on."""
        tasks, progress = self._tasks, self._progress
        if number >= tasks.count:
            heappush(self._urgent, (-math.inf, number))
        elif number > progress.frontier + self._window:
            heappush(self._too_far, number)
        elif tasks.floating[number] and self._latest[number] > progress.at_us + self._ahead_us:
            heappush(self._too_early, (self._latest[number], number))
        else:
            self._offer(number)

    def _offer(self, t: int) -> None:
        heappush(self._urgent, (self._latest[t] if self._tasks.us[t] else -math.inf, t))
        heappush(self._by_age, t)

    def update(self) -> None:
        """Offer what progress has brought near."""
        progress, too_far, too_early = self._progress, self._too_far, self._too_early
        while too_far and too_far[0] <= progress.frontier + self._window:
            self.add(heappop(too_far))
        while too_early and too_early[0][0] <= progress.at_us + self._ahead_us:
            self._offer(heappop(too_early)[1])

    def choose(self, fits: Callable[[int], bool]) -> int:
        """The wait or the compute that should run, or -1: the most urgent, or else the oldest that fits.

        Running the program's oldest compute frees memory soonest.
        """
        count, urgent, done = self._tasks.count, self._urgent, self._progress.done
        while urgent and urgent[0][1] < count and done[urgent[0][1]]:
            heappop(urgent)
        if not urgent:
            return -1
        key, chosen = urgent[0]
        if chosen >= count or (key <= self._progress.at_us + self._ahead_us and fits(chosen)):
            return chosen
        return self._oldest(fits)

    def _oldest(self, fits: Callable[[int], bool]) -> int:
        """Return the oldest that fits. Short of memory, the program's order is known to fit in the end."""
        chosen = -1
        passed: list[int] = []
        while self._by_age and chosen < 0 and len(passed) < TRIED:
            t = heappop(self._by_age)
            if self._progress.done[t]:
                continue
            passed.append(t)
            if fits(t):
                chosen = t
        for t in passed:
            heappush(self._by_age, t)
        return chosen

    def take_wait(self) -> None:
        """The wait that was chosen runs."""
        heappop(self._urgent)
