"""Question: does ``simulate`` stay linear, so that a graph of 100,000 nodes takes a second or two?

    python tools/bench/simulate_scaling.py --out tools/bench/results/simulate_scaling.json

Baseline: the smallest graph; linear means equal microseconds a node. The graph repeats a layer of twelve
nodes: a gathered weight, a product, pointwise work with a residual, a reduce-scatter, views between.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time

import torch
from torch import fx

from inductor_passes.machine import TopologyCostModel, load_topology
from inductor_passes.simulate import simulate
from inductor_passes.testing import fake_group, trace

SIZES = (1_000, 10_000, 100_000)
REPETITIONS = 5
c10d = torch.ops._c10d_functional
aten = torch.ops.aten


def layer(x: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    """One repetition: [256, 1024] activations, a [128, 1024] shard of a weight."""
    weight = c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 8, "0"))
    y = aten.mm(x, aten.t(weight))
    y = aten.mul(aten.sigmoid(y), y)
    summed = c10d.wait_tensor(c10d.reduce_scatter_tensor(y, "avg", 8, "0"))
    whole = aten.expand(aten.view(summed, [1, 32, 1024]), [8, 32, 1024])
    return aten.add(x, aten.view(aten.clone(whole), [256, 1024]))


def repeated(count: int) -> fx.Graph:
    """A graph of about ``count`` nodes: the traced layer copied end to end."""
    one = trace(layer, [256, 1024], [128, 1024], dtype=torch.bfloat16, device="cuda")
    graph = fx.Graph()
    inputs = [node for node in one.nodes if node.op == "placeholder"]
    x, shard = (graph.node_copy(node) for node in inputs)
    while len(graph.nodes) < count:
        copies = dict(zip(inputs, (x, shard), strict=True))
        for node in one.nodes:
            if node.op == "call_function":
                copies[node] = graph.node_copy(node, copies.__getitem__)
        x = copies[one.output_node().args[0]]
    graph.output(x)
    return graph


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    rows = []
    with fake_group(8):
        for size in SIZES:
            graph = repeated(size)
            seconds = []
            for _ in range(REPETITIONS):
                cost = TopologyCostModel(
                    load_topology("h100x8")
                )  # a new one: nothing is remembered
                start = time.process_time()
                timeline = simulate(graph, cost)
                seconds.append(time.process_time() - start)
            assert timeline.makespan_us > 0
            middle = statistics.median(seconds)
            row = {
                "nodes": len(graph.nodes),
                "median_s": round(middle, 4),
                "min_s": round(min(seconds), 4),
                "max_s": round(max(seconds), 4),
                "us_per_node": round(middle / len(graph.nodes) * 1e6, 2),
            }
            rows.append(row)
            print(" ".join(f"{key}={value}" for key, value in row.items()))
    result = {
        "question": __doc__.split("\n")[0],
        "command": "python tools/bench/simulate_scaling.py",
        "baseline": f"{rows[0]['nodes']} nodes",
        "clock": "CPU time of the process",
        "repetitions": REPETITIONS,
        "load_average": round(os.getloadavg()[0], 1),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "torch": torch.__version__,
        "date": str(datetime.date.today()),
        "rows": rows,
    }
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
