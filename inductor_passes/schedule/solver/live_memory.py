"""Bytes alive while tasks run, in a schedule and in the program's own order."""

from __future__ import annotations

from collections import deque

from inductor_passes.schedule.solver.tasks import Tasks


class LiveMemory:
    """Bytes alive at this point of a schedule, and the most so far.

    ``keeping``: how many launches in flight free memory when they are done, and not before.
    """

    def __init__(self, tasks: Tasks) -> None:
        self.live = 0
        self.peak = 0
        self.keeping = 0
        self._tasks = tasks
        self._users = list(tasks.value_users)

    def run(self, t: int) -> None:
        """Task t runs: what it makes comes to life, and what only it still held dies.

        A launch that keeps what it reads holds it until ``waited``.
        """
        tasks, users, live = self._tasks, self._users, self.live
        # ``transient`` counts the peak inside the task, whose nodes free some of their memory
        # before the task ends: it may exceed ``alloc``.
        if live + tasks.transient[t] > self.peak:
            self.peak = live + tasks.transient[t]
        live += tasks.alloc[t] + tasks.kept_inside[t]
        # A collective still reads its input while it runs. Inductor frees that buffer at the wait,
        # not at the launch, where the wait names it.
        kept = tasks.kept[t]
        if kept or tasks.kept_inside[t]:
            self.keeping += 1
        for v in tasks.uses[t]:
            if v not in kept:
                users[v] = left = users[v] - 1
                if not left:
                    live -= tasks.value_bytes[v]
        self.live = live

    def waited(self, t: int) -> None:
        """The launch of task t is done: it holds nothing any more."""
        self.live -= self._tasks.kept_inside[t]
        self.keeping -= self.keeps(t)
        # The same countdown as in ``run``, repeated and not called: this is the innermost loop of
        # every candidate.
        for v in self._tasks.kept[t]:  # as in ``run``
            self._users[v] = left = self._users[v] - 1
            if not left:
                self.live -= self._tasks.value_bytes[v]

    def keeps(self, t: int) -> bool:
        """Return whether task t frees memory only when it has been waited for."""
        return bool(self._tasks.kept[t] or self._tasks.kept_inside[t])

    def hold(self, size: int, beside: int = 0) -> None:
        """The packed copy of a bucket comes to life, ``beside`` bytes of its members; negative:
        it dies.
        """
        self.live += size
        self.peak = max(self.peak, self.live + beside)

    def would_add(self, t: int) -> int:
        """By how much the live bytes would grow if task t ran now; negative if they would
        shrink.
        """
        tasks = self._tasks
        dying = (v for v in tasks.uses[t] if self._users[v] == 1 and v not in tasks.kept[t])
        return tasks.alloc[t] + tasks.kept_inside[t] - sum(tasks.value_bytes[v] for v in dying)


class RiseAhead:
    """Rise of the program's own order above its live bytes, from some task on.

    Computed once a problem; ``within`` looks a given time of compute ahead. A scheduler that keeps
    live bytes under the cap less this can always fall back to the program's order.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        memory = LiveMemory(tasks)
        self._live: list[int] = []
        self._top: list[int] = []
        self._computed = [0.0]
        for t in range(tasks.count):
            self._live.append(memory.live)
            self._top.append(memory.live + tasks.transient[t])
            memory.run(t)
            # In the program's own order a launch counts as waited for at once. What it keeps beyond
            # that would need the place of its wait, and the program's peak is the reference that it
            # is measured from.
            memory.waited(t)
            self._computed.append(self._computed[-1] + tasks.us[t])
        self.peak = memory.peak

    def within(self, horizon_us: float) -> list[int]:
        """Return, per task, the rise over the tasks that start within ``horizon_us`` of compute.

        The entry after the last task is 0.
        """
        # A sliding window maximum: each task enters and leaves the deque once, so that a horizon
        # costs time linear in tasks however far it looks.
        highest: deque[int] = deque()  # tasks of the horizon, later ones higher
        rises = [0] * (self._tasks.count + 1)
        for t in range(self._tasks.count - 1, -1, -1):
            # A later task that rises less can never be the highest of a window that holds task t
            # too.
            while highest and self._top[highest[0]] <= self._top[t]:
                highest.popleft()
            highest.appendleft(t)
            while self._computed[highest[-1]] > self._computed[t + 1] + horizon_us:
                highest.pop()
            rises[t] = self._top[highest[-1]] - self._live[t]
        return rises
