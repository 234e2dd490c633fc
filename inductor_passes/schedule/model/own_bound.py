"""A sharper lower bound: heads and tails that know that machines do one thing at a time.

A task can start only after everything before it. Any set of tasks before it that share one machine takes
at least its one-machine bound, with each task's way to the one in question as its tail. Taking the nearest
tasks before it, on each machine, raises its head above the longest path wherever two products feed one
collective; the same backwards gives tails. The certificate is ``Certificate``: the heads and tails, each
of which can be checked from its neighbours' alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from inductor_passes.schedule.model.bound import Job, least_link_us, one_machine_bound
from inductor_passes.schedule.model.contract import AT_START
from inductor_passes.schedule.model.tasks import Tasks

NEAREST = 12  # tasks looked at before each task


@dataclass(frozen=True, slots=True)
class Certificate:
    """``us``: no schedule is shorter. ``head[t]``: task t cannot start earlier (us from the start);
    ``tail[t]``: and this much must come after its end. ``resource``: what makes the bound, "path",
    "compute" or "group <name>"."""

    us: float
    resource: str
    head: tuple[float, ...]
    tail: tuple[float, ...]


def own_bound(tasks: Tasks, nearest: int = NEAREST) -> Certificate:
    """The bound with its certificate; linear in tasks and in ``nearest``, which looks further."""
    # What waits for nothing may run long before the rest of its task: it is a job of its own.
    early = _early_us(tasks)
    body, duration = [], []
    for t, launch in enumerate(tasks.launch):
        own = tasks.us[t] - early[t]
        body.append(least_link_us(tasks.problem, launch) if launch >= 0 else own)
        duration.append(tasks.link_us[t] if launch >= 0 else own)
    head = _heads(tasks, tasks.preds, duration, body, nearest, 1)
    tail = _heads(tasks, tasks.succs, duration, body, nearest, -1)
    jobs: dict[str, list[Job]] = {}
    for t, us in enumerate(body):
        name = f"group {tasks.group[t]}" if tasks.launch[t] >= 0 else "compute"
        jobs.setdefault(name, []).append((head[t], us, tail[t]))
        jobs.setdefault("compute", []).append((0.0, early[t], duration[t] + tail[t]))
    bounds = {name: one_machine_bound(listed) for name, listed in jobs.items()}
    bounds["path"] = max(
        (h + d + q for h, d, q in zip(head, duration, tail, strict=True)), default=0.0
    )
    resource = max(sorted(bounds), key=bounds.__getitem__)
    return Certificate(bounds[resource], resource, tuple(head), tuple(tail))


def _early_us(tasks: Tasks) -> list[float]:
    """Per task, the compute in it that depends on none of the tasks before it."""
    nodes = tasks.problem.nodes
    floating = [True] * len(nodes)
    early = [0.0] * tasks.count
    for i, node in enumerate(nodes):
        t = tasks.task_of[i]
        outside = any(tasks.task_of[d] not in (t, AT_START) for d in node.deps)
        bound = outside or node.kind == "launch" or any(not floating[d] for d in node.deps)
        floating[i] = not bound
        waits = t != AT_START and (tasks.launch[t] >= 0 or bool(tasks.preds[t]))
        if floating[i] and waits:
            early[t] += node.us
    return early


def _heads(
    tasks: Tasks,
    before: Sequence[list[int]],
    duration: list[float],
    body: list[float],
    nearest: int,
    direction: int,
) -> list[float]:
    """Earliest starts; with ``direction`` -1 and successors for ``before``, least times to the end."""
    head = [0.0] * tasks.count
    for t in range(tasks.count)[::direction]:
        if len(before[t]) < 2:  # what comes before its one predecessor has been seen there
            head[t] = max((head[p] + duration[p] for p in before[t]), default=0.0)
            continue
        way = dict.fromkeys(before[t], 0.0)  # task before t -> longest way from its end to t
        # Latest first: when a task comes up, all ways from it to t have been seen.
        queue = [-direction * p for p in way]
        heapify(queue)
        jobs: dict[str, list[Job]] = {}
        least = max((head[p] + duration[p] for p in way), default=0.0)
        for _ in range(nearest):
            if not queue:
                break
            p = -direction * heappop(queue)
            if body[p]:
                jobs.setdefault(tasks.group[p], []).append((head[p], body[p], way[p]))
            for q in before[p]:
                if q not in way:
                    way[q] = 0.0
                    heappush(queue, -direction * q)
                way[q] = max(way[q], way[p] + duration[p])
        for listed in jobs.values():
            if len(listed) > 1:
                least = max(least, one_machine_bound(listed))
        head[t] = least
    return head
