"""How far a schedule has come, by the program's order and by urgency."""

from __future__ import annotations

from inductor_passes.schedule.model.tasks import Tasks


class Progress:
    """Which tasks are ``done``, and which compute is next.

    ``frontier``: the first compute of the program that is not done. ``at_us``: latest start of the most
    urgent compute that is not done and depends on something; the schedule is on time while its clock,
    counted from the same origin, has not passed it. ``left``: how many tasks are not done.
    """

    def __init__(self, tasks: Tasks, latest: list[float]) -> None:
        self._tasks, self._latest = tasks, latest
        self.done = [False] * tasks.count
        self.left = tasks.count
        self.frontier = 0
        self.at_us = min(latest, default=0.0)
        bound = [t for t in range(tasks.count) if tasks.launch[t] < 0 and not tasks.floating[t]]
        self._by_urgency = sorted(bound, key=latest.__getitem__, reverse=True)
        if self._by_urgency:
            self.at_us = latest[self._by_urgency[-1]]

    def advance(self) -> None:
        """Look past what is done."""
        done, launch, waiting = self.done, self._tasks.launch, self._by_urgency
        frontier = self.frontier
        while frontier < len(done) and (done[frontier] or launch[frontier] >= 0):
            frontier += 1
        self.frontier = frontier
        passed = False
        while waiting and done[waiting[-1]]:
            waiting.pop()
            passed = True
        if passed and waiting:
            self.at_us = self._latest[waiting[-1]]
