"""A lower bound on the makespan of every schedule of a problem, whatever its order and buckets.

One machine at a time: the compute stream, and each group's link. Every job on it has a head (the
longest path of work that must come before), a body and a tail (what must come after). Run with
preemption by longest tail, the jobs end no later than in any schedule (J. R. Jackson, "Scheduling a
production line to minimize maximum tardiness", 1955; J. Carlier, "The one-machine sequencing problem",
European Journal of Operational Research 11, 1982). The longest path through the whole graph bounds too.

On a path a launch counts its time alone: in a bucket it can only end later. As work on its channel it
counts the least that its bytes can cost in any bucket.
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from inductor_passes.schedule.model.problem import MIB, LinkTable, Problem


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
    path = max((h + a + t for h, a, t in zip(head, alone, tail, strict=True)), default=0.0)
    jobs: dict[str, list[Job]] = {}
    slopes: dict[tuple[str, str], float] = {}
    for i, node in enumerate(nodes):
        if node.kind == "compute" and node.us > 0:
            jobs.setdefault("compute", []).append((head[i], node.us, tail[i]))
        elif node.kind == "launch":
            key = (node.group, node.op)
            if key not in slopes:
                slopes[key] = least_us_per_mib(problem.link_table(*key))
            body = slopes[key] * node.payload / MIB
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


def least_us_per_mib(points: LinkTable) -> float:
    """The best rate that a link ever reaches, per MiB of payload, in any bucket."""
    steps = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
    return min(steps + [us / mib for mib, us in points])


def least_link_us(problem: Problem, launch: int) -> float:
    """Time of a launch on its channel if its bytes cost the least that they can in any bucket."""
    node = problem.nodes[launch]
    return least_us_per_mib(problem.link_table(node.group, node.op)) * node.payload / MIB


def one_machine_bound(jobs: list[Job]) -> float:
    """Least makespan of jobs on one machine that may interrupt them."""
    arriving = sorted(jobs)
    if len(arriving) == 2:
        return _bound_of_two(*arriving)
    waiting: list[list[float]] = []  # [-tail, what is left of the body]
    now = best = 0.0
    k = 0
    while k < len(arriving) or waiting:
        if not waiting:
            now = max(now, arriving[k][0])
        while k < len(arriving) and arriving[k][0] <= now:
            heapq.heappush(waiting, [-arriving[k][2], arriving[k][1]])
            k += 1
        negative_tail, left = waiting[0]
        if k < len(arriving) and now + left > arriving[k][0]:
            waiting[0][1] = left - (arriving[k][0] - now)
            now = arriving[k][0]
        else:
            now += left
            heapq.heappop(waiting)
            best = max(best, now - negative_tail)
    return best


def _bound_of_two(first: Job, second: Job) -> float:
    """The same of two jobs of which ``first`` is the earlier: it goes on, or the second one interrupts it."""
    (start, body, tail), (head, other, other_tail) = first, second
    left = body - (head - start)
    if left <= 0.0:  # it has ended by then
        return max(start + body + tail, head + other + other_tail)
    if (-other_tail, other) < (-tail, left):
        return max(head + other + other_tail, head + other + left + tail)
    return max(head + left + tail, head + left + other + other_tail)
