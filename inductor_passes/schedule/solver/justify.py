"""Latest starts: the tasks run backwards in time, each machine always busy if it can be.

Scheduling forwards by latest start, then backwards by latest finish, and again, is the
forward-backward improvement of project scheduling (Li and Willis, European Journal of Operational
Research 56, 1992; Valls, Ballestin and Quintanilla, ibid. 165, 2005).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from inductor_passes.schedule.model.tasks import Tasks


def latest_starts(tasks: Tasks, finish: Sequence[float], link_us: Sequence[float]) -> list[float]:
    """Per task, the latest start (us) in a schedule that ends when the backward run does.

    The backward run lets the task with the largest ``finish`` go first; any increasing measure of
    progress will do. One machine for compute and one per group, on which a launch takes ``link_us``; no
    buckets, no memory. n log n.
    """
    duration = [us + link for us, link in zip(tasks.us, link_us, strict=True)]
    names = {name: m for m, name in enumerate(dict.fromkeys(tasks.group))}
    machine = [names[name] for name in tasks.group]
    waiting: list[list[tuple[float, int]]] = [[] for _ in names]
    busy = [False] * len(names)
    missing = [len(after) for after in tasks.succs]
    end = [0.0] * tasks.count
    running: list[tuple[float, int]] = []
    now = 0.0

    def finished(t: int) -> None:
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
            return [now - at for at in end]
        now = running[0][0]
        while running and running[0][0] <= now:
            t = heappop(running)[1]
            busy[machine[t]] = False
            finished(t)
