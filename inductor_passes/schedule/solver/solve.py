"""Problem -> solution: the best schedule of a portfolio within a memory cap, with its certificate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from inductor_passes.collector import without_cycle_collection
from inductor_passes.schedule.model.bound import lower_bound
from inductor_passes.schedule.model.folded import folded
from inductor_passes.schedule.model.judge import Judgement, judge
from inductor_passes.schedule.model.own_bound import own_bound
from inductor_passes.schedule.model.problem import Problem, Schedule, program_order
from inductor_passes.schedule.model.reasons import explain_exposed
from inductor_passes.schedule.model.solution import Solution
from inductor_passes.schedule.model.tasks import Tasks
from inductor_passes.schedule.solver.expand import expand
from inductor_passes.schedule.solver.hoist_and_sink import hoist_and_sink
from inductor_passes.schedule.solver.rehearse import rehearse
from inductor_passes.schedule.solver.search import Search

JUDGED = 2  # drafts that are judged in full


@without_cycle_collection()
def solve(
    problem: Problem,
    *,
    extra_memory_ratio: float = 0.05,
    extra_memory_bytes: int = 2**30,
    bucket: bool = True,
) -> Solution:
    """Order and bucket a well-formed problem (``check_problem``).

    The cap on peak memory is the program order's peak plus the larger of the two extras; they may be
    negative. If nothing found fits, the leanest schedule found is returned. The result depends on the
    arguments alone: no clock, no hash order, so that all ranks agree.
    """
    original = judge(problem, program_order(problem))
    extra = max(int(extra_memory_ratio * original.peak_bytes), extra_memory_bytes)
    cap = original.peak_bytes + extra
    bound = lower_bound(problem)
    tasks = Tasks(problem)
    least = own_bound(tasks)
    own = max(bound.us, least.us)
    least = replace(least, us=own)
    search = Search(tasks, cap, bound.us, merges=bucket, kept=JUDGED, least=least)
    if (few := folded(problem)) is not None:
        search.follow(rehearse(few, len(problem.nodes) / len(few.nodes), extra, bound.us, bucket))
    else:
        search.run()

    def rank(candidate: tuple[str, Schedule, Judgement]) -> tuple[int, float]:
        _, _, judged = candidate
        return max(0, judged.peak_bytes - cap), judged.makespan_us

    best = "program order", program_order(problem), original
    for name, candidate in _candidates(problem, search):
        best = min(best, (name, candidate, judge(problem, candidate)), key=rank)
    strategy, schedule, judged = best
    return Solution(
        order=schedule.order,
        buckets=schedule.buckets,
        makespan_us=judged.makespan_us,
        bound_us=bound.us,
        own_bound_us=own,
        peak_bytes=judged.peak_bytes,
        cap_bytes=cap,
        exposed_us=judged.exposed_us,
        original_makespan_us=original.makespan_us,
        original_peak_bytes=original.peak_bytes,
        strategy=strategy,
        reasons=explain_exposed(tasks, schedule, judged, own, cap),
    )


def _candidates(problem: Problem, search: Search) -> Iterator[tuple[str, Schedule]]:
    yield "hoist and sink", hoist_and_sink(problem)
    found_us = math.inf
    for found in search.best(JUDGED):
        if found.draft.peak_bytes <= search.cap_bytes and found.draft.makespan_us >= found_us:
            break
        found_us = found.draft.makespan_us
        name = f"{found.rules.priority} window={found.rules.window} round={len(found.how)}"
        yield name, expand(search.tasks, found.draft.steps)
