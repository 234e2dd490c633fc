"""Question: how close to a lower bound does the solver come, problem by problem?

    python tools/bench/schedule_quality.py PROBLEMS_DIR --out
    tools/bench/results/schedule_quality.json

PROBLEMS_DIR holds schedule problems (``*.json.gz`` or ``*.json``, the format of
``inductor_passes/schedule/solver/problem_file.py``). Baselines: the lower bound that the solver
certifies, and the program's own order; ``own`` is our sharper bound, computed apart, looking
further. Makespans are simulated by the rules of ``inductor_passes/schedule/solver/problem.py``;
nothing is measured but the solver's own time (CPU time of the process, JSON aside). Where the
folder has a ``upstream*.jsonl`` (one object per problem: ``problem`` and, per mode, ``makespan_us``
and ``peak_bytes``), the row says how long upstream torch's best mode takes, and ``upstream_capped``
its best mode within our cap.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path

from inductor_passes.schedule.solver.evaluate import evaluate
from inductor_passes.schedule.solver.lower_bound import own_bound
from inductor_passes.schedule.solver.problem_file import load_problem
from inductor_passes.schedule.solver.solve import solve
from inductor_passes.schedule.solver.tasks import Tasks


def upstream_modes(folder: Path) -> dict[str, list[tuple[float, int]]]:
    """Per problem the makespan and peak of each mode of upstream torch, as far as the folder has
    them.
    """
    modes: dict[str, list[tuple[float, int]]] = {}
    for path in sorted(folder.glob("upstream*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            found = [mode for key, mode in entry.items() if key.startswith("upstream_")]
            modes[entry["problem"]] = [(mode["makespan_us"], mode["peak_bytes"]) for mode in found]
    return modes


def main() -> None:
    """Solve every problem, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("problems", type=Path, help="folder of schedule problems")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    paths = sorted([*options.problems.glob("*.json.gz"), *options.problems.glob("*.json")])
    if not paths:
        sys.exit(f"no *.json or *.json.gz in {options.problems}")
    upstream = upstream_modes(options.problems)
    rows = []
    for path in paths:
        problem = load_problem(path)
        start = time.process_time()
        solution = solve(problem)
        seconds = time.process_time() - start
        evaluated = evaluate(problem, solution.schedule)
        own = max(solution.own_bound_us, own_bound(Tasks(problem), nearest=64).us)
        row = {
            "problem": problem.name,
            "nodes": len(problem.nodes),
            "makespan_us": round(evaluated.makespan_us, 1),
            "bound_us": round(solution.bound_us, 1),
            "gap": round(solution.gap, 4),
            "own_bound_us": round(own, 1),
            "own_gap": round(evaluated.makespan_us / own - 1, 4),
            "program_order": round(solution.original_makespan_us / solution.bound_us, 4),
            "peak_bytes": evaluated.peak_bytes,
            "cap_bytes": solution.cap_bytes,
            "within_cap": solution.within_cap,
            "buckets": len(solution.buckets),
            "seconds": round(seconds, 2),
            "strategy": solution.strategy,
        }
        modes = upstream.get(problem.name, [])
        if modes:
            row["upstream"] = round(min(us for us, _ in modes) / solution.bound_us, 4)
            capped = [us for us, peak in modes if peak <= solution.cap_bytes]
            row["upstream_capped"] = round(min(capped) / solution.bound_us, 4) if capped else None
        rows.append(row)
        print(" ".join(f"{key}={value}" for key, value in row.items()))
    summary = {
        "makespan_over_bound": round(statistics.geometric_mean(1 + r["gap"] for r in rows), 4),
        "makespan_over_own_bound": round(
            statistics.geometric_mean(1 + r["own_gap"] for r in rows), 4
        ),
        "program_order_over_bound": round(
            statistics.geometric_mean(r["program_order"] for r in rows), 4
        ),
        "seconds_per_10000_nodes": round(
            1e4 * sum(r["seconds"] for r in rows) / sum(r["nodes"] for r in rows), 2
        ),
    }
    print("geometric means:", summary)
    if options.out:
        result = {
            "question": __doc__.split("\n")[0],
            "command": "python tools/bench/schedule_quality.py PROBLEMS_DIR",
            "kind": "simulated makespans; seconds are CPU time of the solver",
            "summary": summary,
            "machine": (
                f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
            ),
            "load_average": round(os.getloadavg()[0], 1),
            "date": str(datetime.date.today()),
            "rows": rows,
        }
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
