"""The channels of a schedule: until when each is busy, and the launches that queue for it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from inductor_passes.schedule.model.tasks import Tasks
from inductor_passes.schedule.solver.collect import Entry


class Channels:
    """One channel per group. ``free[c]``: when it is free (us).

    Launches that have waited for something (bound) and those that could go at any time (loose) queue
    apart. Those that have been launched from elsewhere (``done``) stay behind and are skipped.
    """

    def __init__(self, tasks: Tasks, done: list[bool]) -> None:
        self._tasks, self._done = tasks, done
        groups = sorted({group for group in (*tasks.group, *tasks.blocks) if group})
        self.number = {group: c for c, group in enumerate(groups)}
        self.free = [0.0] * len(groups)
        self._queues: list[tuple[list[Entry], list[Entry]]] = [([], []) for _ in groups]

    def add(self, entries: Iterable[Entry]) -> None:
        """Launches may go."""
        for entry in entries:
            self.queue(entry)

    def queue(self, entry: Entry) -> None:
        """A launch may go."""
        t = entry[1]
        loose = not self._tasks.preds[t]
        heappush(self._queues[self.number[self._tasks.group[t]]][loose], entry)

    def waiting(self) -> list[int]:
        """The channels for which launches queue, or have queued."""
        return [c for c, (bound, loose) in enumerate(self._queues) if bound or loose]

    def queues(self, c: int) -> tuple[list[Entry], list[Entry]]:
        """The bound and the loose launches of channel c, as heaps whose first may go."""
        for queue in self._queues[c]:
            while queue and self._done[queue[0][1]]:
                heappop(queue)
        return self._queues[c]

    def bound(self) -> Iterator[int]:
        """All bound launches, most urgent first on each channel; the caller may launch them."""
        for queue, _ in self._queues:
            for _, t in sorted(queue):
                if not self._done[t]:
                    yield t

    def next_free(self, now: float) -> float | None:
        """When the first busy channel for which launches queue is free."""
        busy = [at for c, at in enumerate(self.free) if at > now and any(self.queues(c))]
        return min(busy, default=None)
