"""Question: how much communication stays exposed from 8 to 4,096 ranks, with what memory, solved how fast?

    python tools/bench/scaling.py --out tools/bench/results/scaling.json

Simulated, on h100x8. Training steps of Llama-3 8B, 70B and 405B and of DeepSeek-V3 (``scaling_steps.py``)
are traced with fake tensors on a fake group of up to 4,096 ranks, four layers each: further layers repeat
them. Work per rank stays the same as ranks are added. Baseline: the program's own order, in which each wait
follows its launch. "bound" is the exposed share of a schedule as short as the certified lower bound.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from scaling_steps import STEPS, trace_step

from inductor_passes.machine import TopologyCostModel, load_topology
from inductor_passes.schedule.graph.extract import extract
from inductor_passes.schedule.model.solution import Solution
from inductor_passes.schedule.solver.solve import solve
from inductor_passes.testing import fake_group

WORLDS = (8, 64, 512, 4096)
TOPOLOGY = "h100x8"
GIB = 2**30


def main() -> None:
    """Trace, solve, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--only", nargs="*", help="names of steps")
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS)
    options = parser.parse_args()
    rows = []
    for name in options.only or STEPS:
        for world in options.worlds:
            rows.append(measured(name, world))
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    if options.out:
        result = {
            "question": __doc__.split("\n")[0],
            "command": "python tools/bench/scaling.py",
            "kind": "simulated on h100x8; seconds are CPU time of the solver",
            "torch": torch.__version__,
            "rows": rows,
        }
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measured(name: str, world: int) -> dict:
    """One step on one number of ranks."""
    with fake_group(world):
        start = time.process_time()
        graph = trace_step(STEPS[name], world)
        traced = time.process_time() - start
        problem = extract(graph, TopologyCostModel(load_topology(TOPOLOGY)), name=name).problem
        start = time.process_time()
        solution = solve(problem)
        seconds = time.process_time() - start
    compute = sum(node.us for node in problem.nodes)

    def exposed(makespan_us: float) -> float:
        return round(1 - compute / makespan_us, 4)

    return {
        "step": name,
        "ranks": world,
        "nodes": len(problem.nodes),
        "launches": sum(node.kind == "launch" for node in problem.nodes),
        "buckets": len(solution.buckets),
        "step_ms": round(solution.makespan_us / 1e3, 3),
        "program_ms": round(solution.original_makespan_us / 1e3, 3),
        "exposed_share": exposed(solution.makespan_us),
        "exposed_share_program": exposed(solution.original_makespan_us),
        "exposed_share_bound": exposed(solution.own_bound_us),
        "gap": round(solution.gap, 4),
        "peak_gib": round(solution.peak_bytes / GIB, 3),
        "peak_gib_program": round(solution.original_peak_bytes / GIB, 3),
        "why": why(solution),
        "trace_s": round(traced, 2),
        "solve_s": round(seconds, 2),
    }


def why(solution: Solution) -> dict:
    """Exposed microseconds by reason."""
    found: dict[str, float] = {}
    for item in solution.reasons:
        found[item.reason] = round(found.get(item.reason, 0.0) + item.us, 1)
    return found


if __name__ == "__main__":
    main()
