"""What a schedule has run so far, and when."""

from __future__ import annotations

from inductor_passes.schedule.model.tasks import Tasks
from inductor_passes.schedule.solver.channels import Channels
from inductor_passes.schedule.solver.expand import Step
from inductor_passes.simulate.execution import stretched


class History:
    """``now``: the clock of the compute stream (us). ``finish``: when each task has ended.

    ``stalls``: per launch, how long the compute stream stood still for it. ``late``: by how much compute has
    started after its latest start, at most.
    """

    def __init__(self, tasks: Tasks, channels: Channels) -> None:
        self._tasks, self._channels = tasks, channels
        self._stretch = tasks.problem.compute_stretch
        self.now = self.late = 0.0
        self.steps: list[Step] = []
        self.stalls: dict[int, float] = {}
        self.finish = [0.0] * tasks.count

    def takes(self, us: float) -> float:
        """Time of ``us`` of compute from now on, beside what is on its way."""
        if self._stretch <= 1.0:
            return us
        return stretched(us, max(self._channels.free, default=0.0) - self.now, self._stretch)

    def compute(self, us: float, group: str = "") -> None:
        """Run ``us`` of compute, which may hold a group's channel."""
        if group:
            c, free = self._channels.number[group], self._channels.free
            self.now = free[c] = max(self.now, free[c]) + us
        elif us:
            self.now += us if self._stretch <= 1.0 else self.takes(us)

    def launch(self, members: list[int], link_us: float) -> float:
        """Launch a bucket and return when it ends."""
        c, free = self._channels.number[self._tasks.group[members[0]]], self._channels.free
        free[c] = max(self.now, free[c]) + link_us
        for t in members:
            self.finish[t] = free[c]
        self.steps.append(Step(tuple(members)))
        return free[c]

    def stand_still(self, at: float, t: int) -> None:
        """Let time pass until task t can run, or a wait; a task may owe it to a launch."""
        if at > self.now and t < self._tasks.count:
            late = max(self._tasks.preds[t], key=self.finish.__getitem__)
            self.stalls[late] = self.stalls.get(late, 0.0) + at - self.now
        self.now = max(self.now, at)

    def end(self) -> float:
        """When everything has ended."""
        return max([self.now, *self._channels.free])
