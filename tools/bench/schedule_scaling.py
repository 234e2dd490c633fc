"""Question: does the solver's time grow no faster than n log n, at most 2 s per 10,000 nodes?

    python tools/bench/schedule_scaling.py --out tools/bench/results/schedule_scaling.json

Baseline: the smallest problem. A problem repeats a backward layer of 40 nodes: gathered weights, products
for the data and for the weights, recomputed pointwise work, gradients scattered, a tensor-parallel
collective on a second group. CPU time of the process, building the problem aside.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import time

from inductor_passes.schedule.model.problem import MIB, Node, Problem
from inductor_passes.schedule.solver.solve import solve

SIZES = (2_000, 6_000, 20_000, 60_000, 200_000)
LINK = ((1.0, 90.0), (2.0, 115.0), (16.0, 400.0), (64.0, 1330.0), (256.0, 5000.0))
WEIGHTS = 4


def layered(count: int) -> Problem:
    """A problem of about ``count`` nodes."""
    layers = max(1, count // 40)
    nodes = [Node(f"shard_{i}", "input") for i in range(layers * WEIGHTS)]
    nodes.append(Node("gradient", "input"))
    gradient = len(nodes) - 1
    outputs: list[int] = []

    def add(node: Node) -> int:
        nodes.append(node)
        return len(nodes) - 1

    def collective(op: str, group: str, source: int, payload: int, size: int) -> int:
        reduce = "sum" if op == "reduce_scatter" else None
        launch = add(
            Node(op, "launch", (source,), 0.0, size, None, group, op, "bf16", reduce, payload)
        )
        return add(Node("wait", "wait", (launch,), alias=launch, launch=launch))

    for layer in range(layers):
        for w in range(WEIGHTS):
            shard = layer * WEIGHTS + w
            cast = add(Node("cast", "compute", (shard,), 2.0, MIB // 2))
            weight = collective("all_gather", "dp", cast, MIB // 2, 32 * MIB)
            view = add(Node("view", "compute", (weight,), alias=weight))
            kept = add(Node("recomputed", "compute", (shard,), 20.0, 16 * MIB))
            partial = add(Node("mm_data", "compute", (gradient, view), 150.0, 16 * MIB))
            grad = add(Node("mm_weight", "compute", (gradient, kept), 150.0, 32 * MIB))
            outputs.append(collective("reduce_scatter", "dp", grad, 32 * MIB, 4 * MIB))
            gradient = partial
        gradient = collective("reduce_scatter", "tp", gradient, 16 * MIB, 16 * MIB)
        gradient = add(Node("norm", "compute", (gradient,), 10.0, 16 * MIB))
    add(Node("output", "output", (*outputs, gradient)))
    links = {group: {"all_gather": LINK, "reduce_scatter": LINK} for group in ("dp", "tp")}
    return Problem(f"{len(nodes)} nodes", tuple(nodes), links, 2.8e6, {"dp": 8, "tp": 8})


def main() -> None:
    """Solve, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    rows = []
    for size in options.sizes:
        problem = layered(size)
        start = time.process_time()
        solution = solve(problem)
        seconds = time.process_time() - start
        n = len(problem.nodes)
        row = {
            "nodes": n,
            "seconds": round(seconds, 2),
            "seconds_per_10000_nodes": round(seconds / n * 1e4, 3),
            "ns_per_node_and_log2": round(seconds / n / math.log2(n) * 1e9, 1),
            "gap": round(solution.gap, 4),
        }
        rows.append(row)
        print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    result = {
        "question": __doc__.split("\n")[0],
        "command": "python tools/bench/schedule_scaling.py",
        "baseline": f"{rows[0]['nodes']} nodes",
        "clock": "CPU time of the process; one run per size",
        "load_average": round(os.getloadavg()[0], 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "date": str(datetime.date.today()),
        "rows": rows,
    }
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
