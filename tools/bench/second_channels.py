"""Question: how much shorter is a step whose launches may go on second channels of their groups?

    python tools/bench/second_channels.py --out tools/bench/results/second_channels.json

Simulated, on h100x8, each graph on a fake group of 64 ranks: training steps of ``scaling_steps.py``, and the same with one sequence a
group. Baseline: the same graph, scheduled on one channel a group. Every group has a clone; what is on its way at once shares the link, and
only start-ups overlap. ``on_second``: launches that went there; 0 where it was not predicted to gain 1 %; ``note``: what
was tried, in microseconds.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from pathlib import Path

import torch
import torch.distributed as dist
from scaling_steps import STEPS, trace_step
from torch import fx

from inductor_passes import PassOptions
from inductor_passes.graph import channels
from inductor_passes.graph.collectives import group_name, launches
from inductor_passes.pipeline import run_passes
from inductor_passes.testing import fake_group
from inductor_passes.torch_compat import c10d

TOPOLOGY, WORLD = "h100x8", 64


def measured(name: str, graph: fx.Graph) -> dict:
    """The graph scheduled on one channel and on two."""
    for group in sorted({group_name(launch) for launch in launches(graph)}):
        channels.add(group, dist.new_group(list(c10d.group_ranks(group))).group_name)
    one, two = (_ran(graph, count) for count in (1, 2))
    before, after = one.after.makespan_us, two.after.makespan_us
    stats = next(p for p in two.passes if p.name == "second_channels")
    return {
        "graph": name,
        "launches": len(launches(graph)),
        "on_second": stats.counters.get("launches", 0),
        "one_ms": round(before / 1e3, 3),
        "two_ms": round(after / 1e3, 3),
        "two_over_one": round(after / before, 4),
        "peak_one_gib": round(one.after.peak_bytes / 2**30, 3),
        "peak_two_gib": round(two.after.peak_bytes / 2**30, 3),
        "note": stats.notes[0],
        "seconds": round(stats.seconds, 1),
    }


def _ran(graph: fx.Graph, count: int):  # noqa: ANN202
    trial = fx.GraphModule(graph.owning_module or {}, copy.deepcopy(graph))
    return run_passes(trial.graph, PassOptions(topology=TOPOLOGY, channels=count))


def main() -> None:
    """Trace, schedule, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", help="JSON file to write; rows of other graphs in it are kept")
    parser.add_argument("--only", default="", help="part of a name")
    options = parser.parse_args()
    rows: dict[str, dict] = {}
    if options.out and Path(options.out).exists():
        rows = {row["graph"]: row for row in json.loads(Path(options.out).read_text())["rows"]}
    for name, step in STEPS.items():
        if options.only not in name:
            continue
        with fake_group(WORLD):
            rows[name] = measured(name, trace_step(step, WORLD))
            print(json.dumps(rows[name]), flush=True)
            channels.forget()
    mean = round(statistics.geometric_mean(r["two_over_one"] for r in rows.values()), 4)
    print("geometric mean:", mean)
    if options.out:
        result = {
            "question": __doc__.split("\n")[0],
            "command": "python tools/bench/second_channels.py",
            "kind": "simulated on h100x8; seconds on a machine with other work",
            "torch": torch.__version__,
            "two_over_one": mean,
            "rows": [rows[name] for name in STEPS if name in rows],
        }
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
