"""The reason why each exposed collective of a schedule is exposed."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from inductor_passes.schedule.model.judge import Judgement
from inductor_passes.schedule.model.problem import Schedule
from inductor_passes.schedule.model.solution import Exposed
from inductor_passes.schedule.model.tasks import Tasks

NEGLIGIBLE_US = 1.0


def explain_exposed(
    tasks: Tasks, schedule: Schedule, judged: Judgement, bound_us: float, cap_bytes: int
) -> tuple[Exposed, ...]:
    """One entry per exposed launch, in the order of the problem's nodes. See ``Exposed`` for the reasons."""
    at_bound = judged.makespan_us <= bound_us * (1 + 1e-9)
    members = {bucket[0]: bucket for bucket in schedule.buckets}
    position = {i: p for p, i in enumerate(schedule.order)}
    channels: dict[str, _Channel] = {}
    exposed = []
    for launch, us in judged.exposed_by_launch.items():
        together = members.get(launch, (launch,))
        ready = max(_inputs_ready(tasks, judged, i) for i in together)
        start = judged.start_us[launch]
        group = tasks.problem.nodes[launch].group
        if group not in channels:
            channels[group] = _Channel(tasks, schedule, judged, group)
        channel = channels[group]
        if at_bound:
            reason = "at the bound"
        elif start - ready <= NEGLIGIBLE_US:
            reason = "data"
        elif channel.idle_us(ready, start) <= NEGLIGIBLE_US:
            reason = "channel"
        else:
            # Right before it, would its result have fitted?
            size = sum(tasks.alloc[tasks.task_of[i]] for i in together)
            before = judged.live_bytes[schedule.order[position[launch] - 1]]
            reason = "order" if before + size <= cap_bytes else "memory cap"
        exposed.append(Exposed(launch, us, reason))
    return tuple(exposed)


def _inputs_ready(tasks: Tasks, judged: Judgement, launch: int) -> float:
    """Return the time at which all that a launch's task depends on had finished."""
    t = tasks.task_of[launch]
    ready = 0.0
    for p in tasks.preds[t]:
        last = tasks.launch[p] if tasks.launch[p] >= 0 else tasks.before[p][-1]
        ready = max(ready, judged.end_us[last])
    return ready


class _Channel:
    """Busy times of one group's channel."""

    def __init__(self, tasks: Tasks, schedule: Schedule, judged: Judgement, group: str) -> None:
        nodes = tasks.problem.nodes
        # A bucket's members all carry its times: one entry is enough.
        spans = dict.fromkeys(
            (judged.start_us[i], judged.end_us[i])
            for i in schedule.order
            if nodes[i].kind == "launch" and nodes[i].group == group
        )
        self._starts = [start for start, _ in spans]
        self._ends = [end for _, end in spans]
        self._busy = [0.0, *accumulate(end - start for start, end in spans)]

    def idle_us(self, begin: float, end: float) -> float:
        """Return how long the channel was idle between two times."""
        return end - begin - (self._busy_until(end) - self._busy_until(begin))

    def _busy_until(self, time: float) -> float:
        k = bisect_right(self._starts, time)
        if not k:
            return 0.0
        return self._busy[k] - max(0.0, self._ends[k - 1] - time)
