"""``python -m inductor_passes schedule PROBLEM.json[.gz] -o SCHEDULE.json``: solve a problem in
a file.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from typing import Any

from inductor_passes.errors import PassesError
from inductor_passes.schedule.solver.problem import Problem, Solution
from inductor_passes.schedule.solver.problem_file import load_problem, save_schedule
from inductor_passes.schedule.solver.solve import solve


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument("problem", help="schedule problem, JSON, plain or gzipped")
    parser.add_argument("-o", "--out", help="write the schedule here, as JSON")
    parser.add_argument(
        "--extra-memory-ratio",
        type=float,
        default=0.05,
        help="part of the program's peak that may be added to it; the larger extra counts",
    )
    parser.add_argument(
        "--extra-memory-bytes",
        type=int,
        default=2**30,
        help="bytes that may be added to the program's peak; the larger extra counts",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Solve, write, print; 0, or 2 after a one-line error."""
    try:
        problem = load_problem(arguments.problem)
        start = time.perf_counter()
        solution = solve(
            problem,
            extra_memory_ratio=arguments.extra_memory_ratio,
            extra_memory_bytes=arguments.extra_memory_bytes,
        )
        seconds = time.perf_counter() - start
        if arguments.out:
            save_schedule(solution.schedule, arguments.out)
    except (PassesError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result = as_json(problem, solution, seconds)
    print(json.dumps(result) if arguments.json else _text(result))
    return 0


def as_json(problem: Problem, solution: Solution, seconds: float) -> dict[str, Any]:
    """Return the object that ``--json`` prints. Times in microseconds, predicted by the rules of
    ``problem.py``.
    """
    return {
        "problem": problem.name,
        "nodes": len(problem.nodes),
        "launches": sum(node.kind == "launch" for node in problem.nodes),
        "buckets": len(solution.buckets),
        "original_makespan_us": solution.original_makespan_us,
        "makespan_us": solution.makespan_us,
        "bound_us": solution.bound_us,
        "own_bound_us": solution.own_bound_us,
        "gap": solution.gap,
        "exposed_us": solution.exposed_us,
        "original_peak_bytes": solution.original_peak_bytes,
        "peak_bytes": solution.peak_bytes,
        "cap_bytes": solution.cap_bytes,
        "within_cap": solution.within_cap,
        "seconds": round(seconds, 3),
        "strategy": solution.strategy,
        "exposed": [
            {
                "launch": exposed.launch,
                "name": problem.nodes[exposed.launch].name,
                "us": exposed.us,
                "reason": exposed.reason,
            }
            for exposed in solution.reasons
        ],
    }


def _text(result: dict[str, Any]) -> str:
    by_reason: dict[str, list[float]] = defaultdict(list)
    for exposed in result["exposed"]:
        by_reason[exposed["reason"]].append(exposed["us"])
    lines = [
        f"{result['problem']}: {result['nodes']} nodes, {result['launches']} launches, "
        f"{result['buckets']} buckets, {result['seconds']:.2f} s, {result['strategy']}",
        f"makespan {result['makespan_us']:.0f} us (was {result['original_makespan_us']:.0f}), "
        f"bound {result['bound_us']:.0f}, gap {result['gap']:.2%}; "
        f"own bound {result['own_bound_us']:.0f}",
        f"peak {result['peak_bytes'] / 2**30:.2f} GiB (was "
        f"{result['original_peak_bytes'] / 2**30:.2f}, cap {result['cap_bytes'] / 2**30:.2f})",
        f"exposed {result['exposed_us']:.0f} us, by reason: "
        + (
            ", ".join(f"{r} {sum(us):.0f} in {len(us)}" for r, us in sorted(by_reason.items()))
            or "none"
        ),
    ]
    if not result["within_cap"]:
        lines.append(
            f"The cap of {result['cap_bytes']} bytes is below what any order found needs; "
            f"the least found is {result['peak_bytes']}."
        )
    return "\n".join(lines)
