"""Problem -> solution: a portfolio of schedules, the best within the memory cap."""

from __future__ import annotations

from inductor_passes.schedule.bound import lower_bound
from inductor_passes.schedule.greedy import launches_early_waits_late
from inductor_passes.schedule.judge import judge
from inductor_passes.schedule.problem import Problem, program_order
from inductor_passes.schedule.solution import Exposed, Solution


def solve(
    problem: Problem,
    *,
    effort: str = "default",
    extra_memory_ratio: float = 0.05,
    extra_memory_bytes: int = 2**30,
    bucket: bool = True,
) -> Solution:
    """Order and bucket a problem.

    The cap on peak memory is the program order's peak plus the larger of the two extras. The result
    depends on the arguments alone: no clock, no hash order. Raises ``ProblemError`` for a bad problem.
    """
    candidates = {
        "program order": program_order(problem),
        "greedy": launches_early_waits_late(problem),
    }
    judged = {name: judge(problem, schedule) for name, schedule in candidates.items()}
    original = judged["program order"]
    extra = max(int(extra_memory_ratio * original.peak_bytes), extra_memory_bytes)
    cap = original.peak_bytes + extra
    fitting = [name for name in candidates if judged[name].peak_bytes <= cap]
    strategy = min(fitting, key=lambda name: judged[name].makespan_us)
    best = judged[strategy]
    bound = lower_bound(problem)
    return Solution(
        order=candidates[strategy].order,
        buckets=candidates[strategy].buckets,
        makespan_us=best.makespan_us,
        bound_us=bound.us,
        peak_bytes=best.peak_bytes,
        cap_bytes=cap,
        exposed_us=best.exposed_us,
        original_makespan_us=original.makespan_us,
        original_peak_bytes=original.peak_bytes,
        strategy=strategy,
        reasons=tuple(Exposed(i, us, "data") for i, us in best.exposed_by_launch.items()),
    )
