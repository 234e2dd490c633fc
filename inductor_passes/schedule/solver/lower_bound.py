"""Bound the makespan of every schedule of a problem from below, whatever its order and buckets.

The bound looks at one machine at a time: the compute stream, and each group's link. Every job on it
has a head (the longest path of work that must come before), a body and a tail (what must come
after). Run with preemption by longest tail, the jobs end no later than in any schedule (J. R.
Jackson, "Scheduling a production line to minimize maximum tardiness", 1955; J. Carlier, "The
one-machine sequencing problem", European Journal of Operational Research 11, 1982). The longest
path through the whole graph bounds too.

On a path, a launch counts its time alone, because in a bucket it can only end later. On its
channel, it counts the least that its bytes can cost in any bucket.

All compute runs on one stream, and all bytes of a group on one channel, at the best rate that its
link ever reaches. A split adds kernels, reads weights again and starts more launches; it takes none
of this away.

A task can start only after everything before it. Any set of tasks before it that share one machine
takes at least its one-machine bound, with each task's way to the one in question as its tail. On
each machine, the bound takes the nearest tasks before it. This raises its head above the longest
path wherever two products feed one collective. The same backwards gives tails. The certificate is
``Certificate``: the heads and tails. Each can be checked from its neighbours' alone.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from inductor_passes.schedule.solver.problem import MIB, LinkTable, Problem
from inductor_passes.schedule.solver.tasks import AT_START, Tasks


@dataclass(frozen=True, slots=True)
class Bound:
    """``us`` is the largest of ``by_resource``: "path", "compute" and "group <name>"."""

    us: float
    by_resource: dict[str, float]


Job = tuple[float, float, float]  # head, body, tail, in microseconds


def lower_bound(problem: Problem) -> Bound:
    """The bound, and what each resource alone would allow. n log n in nodes."""
    nodes = problem.nodes
    alone = durations_alone(problem)
    head, tail = heads_and_tails(problem, alone)
    # On a path the time alone is right: in a bucket a launch starts no earlier and ends with the
    # whole bucket, which takes at least as long as its own payload does.
    path = max((h + a + t for h, a, t in zip(head, alone, tail, strict=True)), default=0.0)
    jobs: dict[str, list[Job]] = {}
    for i, node in enumerate(nodes):
        if node.kind == "compute" and node.us > 0:
            jobs.setdefault("compute", []).append((head[i], node.us, tail[i]))
        elif node.kind == "launch":
            # The least slope of the link's table, not the time of this launch alone: in a large
            # bucket its latency is shared, and the bound must hold for every choice of buckets.
            body = least_link_us(problem, i)
            jobs.setdefault(f"group {node.group}", []).append((head[i], body, tail[i]))
    by_resource = {name: one_machine_bound(listed) for name, listed in sorted(jobs.items())}
    by_resource["path"] = path
    return Bound(max(by_resource.values()), by_resource)


def durations_alone(problem: Problem) -> list[float]:
    """Time of each node on its own stream: compute, or the link outside any bucket."""
    return [
        problem.launch_us(i) if node.kind == "launch" else node.us
        for i, node in enumerate(problem.nodes)
    ]


def heads_and_tails(problem: Problem, duration: list[float]) -> tuple[list[float], list[float]]:
    """Per node, the longest path that ends before it and the longest that starts after it."""
    head, tail = [0.0] * len(duration), [0.0] * len(duration)
    for i, node in enumerate(problem.nodes):
        for d in node.deps:
            if head[d] + duration[d] > head[i]:
                head[i] = head[d] + duration[d]
    for i in range(len(duration) - 1, -1, -1):
        through = tail[i] + duration[i]
        for d in problem.nodes[i].deps:
            if through > tail[d]:
                tail[d] = through
    return head, tail


@functools.lru_cache(256)
def least_us_per_mib(points: LinkTable) -> float:
    """The best rate that a link ever reaches, per MiB of payload, in any bucket."""
    steps = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
    # Beyond its last point a table goes on with the last slope, so the rays to its points alone
    # would not do. Nor would slopes alone, where one is steeper than the ray to its first point.
    return min(steps + [us / mib for mib, us in points])


def least_link_us(problem: Problem, launch: int) -> float:
    """Time of a launch on its channel if its bytes cost the least that they can in any bucket."""
    node = problem.nodes[launch]
    return least_us_per_mib(problem.link_table(node.group, node.op)) * node.payload / MIB


def one_machine_bound(jobs: list[Job]) -> float:
    """Least makespan of jobs on one machine that may interrupt them."""
    # Jackson's preemptive schedule: at each arrival the job with the longest tail goes on. It is
    # optimal with preemption, hence a bound without.
    arriving = sorted(jobs)
    # Most calls from ``_heads`` have two jobs: two products that feed one collective. In closed
    # form they cost a third of the loop.
    if len(arriving) == 2:
        return _bound_of_two(*arriving)
    waiting: list[list[float]] = []  # [-tail, what is left of the body]
    now = best = 0.0
    k = 0
    while k < len(arriving) or waiting:
        # The machine is idle until the next arrival: no work is available, in any schedule.
        if not waiting:
            now = max(now, arriving[k][0])
        while k < len(arriving) and arriving[k][0] <= now:
            heapq.heappush(waiting, [-arriving[k][2], arriving[k][1]])
            k += 1
        negative_tail, left = waiting[0]
        # Interrupted: the arrival may have a longer tail. What is left of the body goes back under
        # its own tail.
        if k < len(arriving) and now + left > arriving[k][0]:
            waiting[0][1] = left - (arriving[k][0] - now)
            now = arriving[k][0]
        else:
            now += left
            heapq.heappop(waiting)
            best = max(best, now - negative_tail)
    return best


def _bound_of_two(first: Job, second: Job) -> float:
    """Return the same for two jobs: the earlier goes on, or the second one interrupts it.

    ``first`` is the earlier.
    """
    (start, body, tail), (head, other, other_tail) = first, second
    left = body - (head - start)
    if left <= 0.0:  # it has ended by then
        return max(start + body + tail, head + other + other_tail)
    if (-other_tail, other) < (-tail, left):
        return max(head + other + other_tail, head + other + left + tail)
    return max(head + left + tail, head + left + other + other_tail)


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
    # Heads and tails come from the same procedure on the graph and on its reverse, so that each can
    # be checked by the same rule.
    head = _heads(tasks, tasks.preds, duration, body, nearest, 1)
    tail = _heads(tasks, tasks.succs, duration, body, nearest, -1)
    jobs: dict[str, list[Job]] = {}
    for t, us in enumerate(body):
        name = f"group {tasks.group[t]}" if tasks.launch[t] >= 0 else "compute"
        jobs.setdefault(name, []).append((head[t], us, tail[t]))
        # Head 0, because it waits for nothing; but the rest of its own task must come after it.
        jobs.setdefault("compute", []).append((0.0, early[t], duration[t] + tail[t]))
    bounds = {name: one_machine_bound(listed) for name, listed in jobs.items()}
    bounds["path"] = max(
        (h + d + q for h, d, q in zip(head, duration, tail, strict=True)), default=0.0
    )
    # Sorted first, so that equal bounds name the same resource on every rank.
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
    """Earliest starts; with ``direction`` -1 and successors for ``before``, least times to the
    end.
    """
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


def limit_us(problem: Problem) -> float:
    """Return the larger of all compute and the busiest channel, whose launches are priced by
    bytes alone.
    """
    busy = {"": sum(node.us for node in problem.nodes if node.kind == "compute")}
    for i, node in enumerate(problem.nodes):
        if node.kind == "launch":
            link = f"group {node.group}"
            busy[link] = busy.get(link, 0.0) + least_link_us(problem, i)
    return max(busy.values())
