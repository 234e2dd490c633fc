"""Solve a problem: the best schedule of a portfolio within a memory budget, with its lower bound.

A candidate beside those of the search.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from inductor_passes.garbage_collector import without_cycle_collection
from inductor_passes.schedule.solver.evaluate import Evaluation, evaluate, explain_exposed
from inductor_passes.schedule.solver.list_scheduler import ANY, expand
from inductor_passes.schedule.solver.lower_bound import lower_bound, own_bound
from inductor_passes.schedule.solver.problem import Node, Problem, Schedule, Solution, program_order
from inductor_passes.schedule.solver.repeated_layers import folded
from inductor_passes.schedule.solver.search import Search, search_folded
from inductor_passes.schedule.solver.slack import with_slack_used
from inductor_passes.schedule.solver.tasks import Tasks


def hoist_and_sink(problem: Problem) -> Schedule:
    """Keep compute in program order; put launches right after inputs, and waits right before users.

    No launch passes a collective of its group that blocks compute, because that would wait for it.
    """
    nodes = problem.nodes
    count = len(nodes)
    # Compute stands at its number, a launch half behind what it needs, a wait a quarter behind what
    # is in front of its first user; no wait moves up, so that a launch may rely on its place.
    behind = list(range(count))
    blocked: dict[str, int] = {}  # by group, behind what its last collective that blocks stands
    for i, node in enumerate(nodes):
        if node.kind == "launch":
            behind[i] = max((behind[d] for d in node.deps), default=-1)
            behind[i] = max(behind[i], blocked.get(node.group, -1))
        elif node.blocks:
            blocked[node.group] = i
    first_user = [count] * count
    for i in range(count - 1, -1, -1):
        if nodes[i].kind == "wait":
            behind[i] = max(i, first_user[i] - 1)
        for d in nodes[i].deps:
            user = behind[i] + 1 if nodes[i].kind == "launch" else behind[i]
            first_user[d] = min(first_user[d], user)
    offset = {"launch": 0.5, "wait": 0.25}
    place = [behind[i] + offset.get(node.kind, 0.0) for i, node in enumerate(nodes)]
    return Schedule(tuple(sorted(range(count), key=lambda i: (place[i], i))))


EVALUATED = 2  # candidates that are evaluated in full


@without_cycle_collection()
def solve(
    problem: Problem,
    *,
    extra_memory_ratio: float = 0.05,
    extra_memory_bytes: int = 2**30,
    bucket: bool = True,
) -> Solution:
    """Order and bucket a well-formed problem (``check_problem``).

    The cap on peak memory is the program order's peak plus the larger of the two extras; they may
    be negative. If nothing found fits, the leanest schedule found is returned. The result depends
    on the arguments alone: no clock, no hash order, so that all ranks agree.
    """
    original = evaluate(problem, program_order(problem))
    extra = max(int(extra_memory_ratio * original.peak_bytes), extra_memory_bytes)
    cap = original.peak_bytes + extra
    bound = lower_bound(problem)
    tasks = Tasks(problem)
    least = own_bound(tasks)
    own = max(bound.us, least.us)
    least = replace(least, us=own)
    search = Search(tasks, cap, bound.us, merges=bucket, kept=EVALUATED, least=least)
    if (few := folded(problem)) is not None:
        search.follow(
            search_folded(few, len(problem.nodes) / len(few.nodes), extra, bound.us, bucket)
        )
    else:
        search.run()

    def rank(candidate: tuple[str, Schedule, Evaluation]) -> tuple[int, float]:
        _, _, evaluated = candidate
        return max(0, evaluated.peak_bytes - cap), evaluated.makespan_us

    best = "program order", program_order(problem), original
    for name, candidate in _candidates(problem, search):
        best = min(best, (name, candidate, evaluate(problem, candidate)), key=rank)
    strategy, schedule, evaluated = best
    schedule, evaluated = with_slack_used(problem, schedule, evaluated, cap)
    return Solution(
        order=schedule.order,
        buckets=schedule.buckets,
        makespan_us=evaluated.makespan_us,
        bound_us=bound.us,
        own_bound_us=own,
        peak_bytes=evaluated.peak_bytes,
        cap_bytes=cap,
        exposed_us=evaluated.exposed_us,
        original_makespan_us=original.makespan_us,
        original_peak_bytes=original.peak_bytes,
        strategy=strategy,
        reasons=explain_exposed(tasks, schedule, evaluated, own, cap),
    )


def _candidates(problem: Problem, search: Search) -> Iterator[tuple[str, Schedule]]:
    yield "hoist and sink", hoist_and_sink(problem)
    found_us = math.inf
    for found in search.best(EVALUATED):
        if (
            found.candidate.peak_bytes <= search.cap_bytes
            and found.candidate.makespan_us >= found_us
        ):
            break
        found_us = found.candidate.makespan_us
        window = "any" if found.rules.window == ANY else found.rules.window
        name = f"{found.rules.priority} window={window} round={len(found.how)}"
        yield name, expand(search.tasks, found.candidate.steps)


MOST = 32  # solutions that are kept, the latest
_solutions: OrderedDict[tuple[object, ...], Solution] = OrderedDict()


def solve_once(
    problem: Problem,
    *,
    extra_memory_ratio: float = 0.05,
    extra_memory_bytes: int = 2**30,
    bucket: bool = True,
) -> Solution:
    """Return what ``solve`` returns, at once where this process has solved an equal problem with
    equal arguments.
    """
    key = (digest(problem), extra_memory_ratio, extra_memory_bytes, bucket)
    if key not in _solutions:
        _solutions[key] = solve(
            problem,
            extra_memory_ratio=extra_memory_ratio,
            extra_memory_bytes=extra_memory_bytes,
            bucket=bucket,
        )
    _solutions.move_to_end(key)
    while len(_solutions) > MOST:
        _solutions.popitem(last=False)
    return _solutions[key]


def digest(problem: Problem) -> str:
    """Digest of all that a solution depends on: everything but names."""
    nodes = [tuple(getattr(node, name) for name in _OF_NODES) for node in problem.nodes]
    links = sorted(
        (group, op, tuple(points))
        for group, tables in problem.links.items()
        for op, points in tables.items()
    )
    rest = [_plain(getattr(problem, name)) for name in _OF_PROBLEMS]
    return hashlib.sha256(repr((nodes, links, rest)).encode()).hexdigest()


# A field that is added to either is part of the digest.
_OF_NODES = [field.name for field in fields(Node) if field.name != "name"]
_OF_PROBLEMS = [f.name for f in fields(Problem) if f.name not in ("name", "nodes", "links")]


def _plain(value: object) -> object:
    return sorted(value.items()) if isinstance(value, Mapping) else value
