"""When the tasks of a schedule, and the waits for its launches, become ready to run."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from inductor_passes.schedule.model.tasks import Tasks
from inductor_passes.schedule.solver.collect import Entry


class Arrivals:
    """Tasks that wait for others, and waits (numbers from ``tasks.count`` on) that wait for their launches."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._missing = [len(before) for before in tasks.preds]
        self._ready_at = [0.0] * tasks.count
        self._coming: list[Entry] = [
            (0.0, t) for t, missing in enumerate(self._missing) if not missing
        ]

    def __bool__(self) -> bool:
        return bool(self._coming)

    @property
    def next(self) -> tuple[float, int]:
        """When the next becomes ready (us), and its number."""
        return self._coming[0]

    def add(self, number: int, at: float) -> None:
        """A task or wait will be ready at some time (us)."""
        heappush(self._coming, (at, number))

    def complete(self, t: int, at: float) -> None:
        """Task t ends at some time (us): it keeps those behind it no longer than that."""
        missing, ready_at = self._missing, self._ready_at
        for s in self._tasks.succs[t]:
            missing[s] -= 1
            if at > ready_at[s]:
                ready_at[s] = at
            if not missing[s]:
                heappush(self._coming, (ready_at[s], s))

    def arrived(self, done: list[bool]) -> Iterator[int]:
        """Tasks that wait for nothing and are not done, where none is still to come."""
        return (t for t, missing in enumerate(self._missing) if not missing and not done[t])

    def due(self, now: float) -> list[int]:
        """Take those that are ready by now."""
        coming, found = self._coming, []
        while coming and coming[0][0] <= now:
            found.append(heappop(coming)[1])
        return found
