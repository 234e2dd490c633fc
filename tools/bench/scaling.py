"""Question: how much communication stays exposed from 8 to 4,096 ranks, with what memory, solved how fast?

    python tools/bench/scaling.py --out tools/bench/results/scaling.json --plot tools/bench/results/scaling.svg

Simulated, on h100x8. Training steps of Llama-3 8B, 70B and 405B and of DeepSeek-V3 (``scaling_steps.py``)
are traced with fake tensors on a fake group of up to 4,096 ranks, four layers each: further layers repeat
them. Work per rank stays the same as ranks are added. Baseline: the program's own order, in which each wait
follows its launch. "bound" is the exposed share of a schedule as short as the certified lower bound. "formula" is what the
formula of the step on 64 ranks says without a trace: with all hidden that can be and no launch merged (a
schedule that merges is shorter), and with nothing hidden.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from scaling_steps import STEPS, trace_step

from inductor_passes.machine import TopologyCostModel, load_topology
from inductor_passes.machine.formula import GraphCosts, StepFormula
from inductor_passes.schedule.graph.extract import extract
from inductor_passes.schedule.model.solution import Solution
from inductor_passes.schedule.solver.solve import solve
from inductor_passes.testing import fake_group

WORLDS = (8, 64, 512, 4096)
FORMULA_WORLD = 64
TOPOLOGY = "h100x8"
GIB = 2**30


def main() -> None:
    """Trace, solve, print, write, plot."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--plot", help="picture to write; needs matplotlib (extra bench)")
    parser.add_argument("--only", nargs="*", help="names of steps")
    parser.add_argument("--worlds", type=int, nargs="*", default=WORLDS)
    options = parser.parse_args()
    rows = []
    for name in options.only or STEPS:
        formula = formula_of(name)
        for world in options.worlds:
            step = formula.at(n=max(world // STEPS[name].tp, 1))
            between = [round(us / 1e3, 3) for us in (step.at_least_us, step.at_most_us)]
            rows.append({**measured(name, world), "formula_ms": between})
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
    if options.plot:
        plot(rows, options.plot)


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


def formula_of(name: str) -> StepFormula:
    """The formula of one step, traced on ``FORMULA_WORLD`` ranks; n is the ranks of data parallelism."""
    step, topology = STEPS[name], load_topology(TOPOLOGY)
    with fake_group(FORMULA_WORLD):
        costs = GraphCosts.of(trace_step(step, FORMULA_WORLD), topology)
    return StepFormula.of([costs], topology, [range(0, FORMULA_WORLD, step.tp)])


def why(solution: Solution) -> dict:
    """Exposed microseconds by reason."""
    found: dict[str, float] = {}
    for item in solution.reasons:
        found[item.reason] = round(found.get(item.reason, 0.0) + item.us, 1)
    return found


def plot(rows: list[dict], path: str) -> None:
    """Four panels over ranks: exposed share, peak memory, solve time, and the step beside its formula."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "scaling"  # the same bytes from the same numbers
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 2, figsize=(13, 10), layout="constrained")
    panels = grid.flatten()
    titles = {
        "exposed_share": "exposed share of the step (dotted: program order)",
        "peak_gib": "peak memory of four layers, GiB (dotted: program order)",
        "solve_s": "solve time, s of CPU",
        "step_ms": "step, ms (shaded: all and nothing hidden, by the formula of 64 ranks)",
    }
    for panel, (key, title) in zip(panels, titles.items(), strict=True):
        for name in dict.fromkeys(row["step"] for row in rows):
            mine = [row for row in rows if row["step"] == name]
            ranks = [row["ranks"] for row in mine]
            (line,) = panel.plot(ranks, [row[key] for row in mine], marker="o", label=name)
            if key == "step_ms":
                least, most = zip(*(row["formula_ms"] for row in mine), strict=True)
                panel.fill_between(ranks, least, most, color=line.get_color(), alpha=0.15)
            elif f"{key}_program" in mine[0]:
                before = [row[f"{key}_program"] for row in mine]
                panel.plot(ranks, before, linestyle=":", color=line.get_color())
        panel.set(title=title, xlabel="ranks", xscale="log")
        if key == "step_ms":
            panel.set(yscale="log")
        else:
            panel.set(ylim=(0, None))
        panel.set_xticks(sorted({row["ranks"] for row in rows}))
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize="small")
    figure.suptitle(f"Training steps of four layers, simulated on {TOPOLOGY}")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
