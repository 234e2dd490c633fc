"""One rank of the demo: the same training run eager, under upstream Inductor and under dynamo_dist.

Started by ``training.py`` through torchrun, or by ``link.py`` in a network namespace. Writes what
it measured and its report to ``rank<R>.json`` in the work folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from data import PARALLEL, Sizes, load, mesh_of, share_of, text_batches
from own_machine import Alone, write_topology
from progress import Progress
from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.diagnostics import Fact, RunReport, collect
from dynamo_dist.numerics.comparison import TITLES, compiled, launches_counted, plugin_for
from dynamo_dist.torch_compat.dynamo_compiler import unique_graphs
from inductor_passes.report.figures import totals
from inductor_passes.testing import leave_process

LEARNING_RATE = 1e-3
# Beside the three, over a link, by how the model is parallel: ways to train it -> whose way it is,
# and its options.
BESIDE = {
    "fsdp": {"upstream_blocks": ("upstream", {})},
    "tensor": {
        "split_auto": ("ours", {"split": "auto"}),
        "split_2": ("ours", {"split": 2}),
    },
}
TURN_STEPS = 4  # of one variant, before the next has its turn


def main() -> None:
    """Train with each variant from the same checkpoint and write the results."""
    args = parse()
    work = Path(args.work)
    sizes = Sizes(args.layers, args.hidden, args.batch, args.sequence)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    rank = dist.get_rank()
    (work / f"rank{rank}.pid").write_text(str(os.getpid()))
    progress = Progress(show=rank == 0)
    try:
        mesh = mesh_of(args.parallel)
        batches = [share_of(b, args.parallel, mesh) for b in text_batches(sizes, args.steps)]
        alone, topology = Alone.read(args.alone), args.topology
        if alone is not None:
            progress.phase("measuring the link")
            topology = str(work / "this_link.json")
            write_topology(Path(topology), compute=alone.slower)
        options = {"topology": topology}
        beside = BESIDE.get(args.parallel, {}) if alone is not None else {}
        within = {f"memory_{budget}": ("ours", {"memory": budget}) for budget in args.memory}
        runs = {
            name: Run(name, whose, work / "checkpoint", {**options, **own}, args.parallel, mesh)
            for name, (whose, own) in {**{v: (v, {}) for v in TITLES}, **beside, **within}.items()
        }
        train(runs, batches, progress)
        data = {"rank": rank, "variants": {name: run.to_json() for name, run in runs.items()}}
        data["report"] = report_with_times(runs, args.measured).to_json()
        if alone is not None:
            data["predicted"] = {
                name: prediction(runs[name], alone.ms) for name in ("ours", *within)
            }
        (work / f"rank{rank}.json").write_text(json.dumps(data))
        dist.barrier()
    finally:
        progress.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """The options that ``main.py`` passes on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--topology", required=True)
    parser.add_argument(
        "--alone", default="", help="what alone.py found; the link is measured then"
    )
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--timeout", type=int, required=True)
    parser.add_argument("--parallel", required=True, choices=tuple(PARALLEL))
    parser.add_argument("--memory", nargs="+", default=[])
    parser.add_argument("--measured", required=True, help="what the times are times of")
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    return parser.parse_args()


class Run:
    """The training of one variant: its model, and what was seen of it."""

    def __init__(
        self,
        variant: str,
        whose: str,
        checkpoint: Path,
        options: dict,
        parallel: str,
        mesh: DeviceMesh,
    ) -> None:
        self.variant, self.whose = variant, whose
        with plugin_for(self.whose):
            self.model = load(checkpoint, parallel, mesh)
        # foreach=False: tensor parallelism leaves norms plain, and a list may not mix the two
        # kinds.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, foreach=False)
        self.losses: list[float] = []
        self.times: list[float] = []
        self.gradient_times: list[float] = []  # of forward and backward alone
        self.turns: list[int] = []  # where in ``times`` each turn starts
        self.launches: dict[str, int] = {}
        self.graph_count = 0
        self.reports: list[RunReport] = []
        with plugin_for(self.whose):
            if variant == "upstream_blocks":
                for block in self.model.model.layers:
                    block.compile()
                self.forward = self.model
            else:
                self.forward = compiled(self.model, self.whose, options)

    def turn(self, batches: list[torch.Tensor]) -> float:
        """Optimizer steps, one a batch; returns the loss before the last."""
        self.turns.append(len(self.times))
        with self._watched():
            for batch in batches:
                start = time.perf_counter()
                loss = self.loss(batch)
                loss.backward()
                self.gradient_times.append(1e3 * (time.perf_counter() - start))
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
                self.times.append(1e3 * (time.perf_counter() - start))
        return self.losses[-1]

    def count_launches(self, batch: torch.Tensor) -> None:
        """Launches of one more forward and backward; the profiler slows it, so it is not timed."""
        with self._watched(), launches_counted() as launches:
            self.loss(batch).backward()
        self.launches = dict(launches)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        """Next-byte loss of a batch [batch, sequence]."""
        return self.forward(input_ids=batch, labels=batch, use_cache=False).loss

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        graphs = unique_graphs()
        with plugin_for(self.whose), collect() as collector:
            yield
        self.graph_count += unique_graphs() - graphs
        self.reports.append(collector.report())

    @property
    def report(self) -> RunReport:
        """Everything that was compiled in any step."""
        graphs = {graph.graph_id: graph for report in self.reports for graph in report.graphs}
        return dataclasses.replace(
            max(self.reports, key=lambda report: len(report.graphs)),
            graphs=tuple(graphs.values()),
            breaks=tuple(item for report in self.reports for item in report.breaks),
            recompiles=tuple(item for report in self.reports for item in report.recompiles),
        )

    def to_json(self) -> dict:
        """Losses, and what a comparison records; plain JSON types."""
        report = self.report
        simulated = totals(report.graphs)
        return {
            "losses": self.losses,
            "forward_backward_ms": self.warm(self.gradient_times),
            "graphs": self.graph_count,
            "graph_breaks": sum(item.count for item in report.breaks),
            "launches": self.launches,
            "first_s": self.times[0] / 1e3,
            "step_ms": self.warm(self.times),
            "exposed_us": (simulated.exposed_before_us, simulated.exposed_after_us),
            "decided": [
                dict(each.counters)
                for graph in report.graphs
                for each in graph.passes
                if each.name == "keep_within_budget" and each.counters
            ],
            "topology": next((graph.topology for graph in report.graphs), None),
        }

    def warm(self, times: list[float]) -> tuple[float, ...]:
        """Milliseconds of the steps that show the speed, of those of all.

        Not of the first of a turn: switching the plugin empties DTensor's caches of sharding
        decisions, which the eager parts of a step fill again. Nobody switches between the steps of
        a training run.
        """
        warm = [ms for index, ms in enumerate(times) if index not in self.turns]
        return tuple(warm) or (times[-1],)


def train(runs: dict[str, Run], batches: list[torch.Tensor], progress: Progress) -> None:
    """The variants take turns of a few steps: a busy machine slows all alike."""
    for name, run in runs.items():
        progress.phase(f"step 0, {name}" + ("" if name == "eager" else ": compiling"))
        progress.advance(f"loss {run.turn(batches[:1]):.4f}")
    turns = [batches[at : at + TURN_STEPS] for at in range(1, len(batches), TURN_STEPS)]
    progress.phase("training, in turn", len(turns))
    order = list(runs.items())
    for turn in turns:
        order.append(order.pop(0))  # none always follows the same one
        losses = [f"{name} {run.turn(turn):.4f}" for name, run in order]
        progress.advance("loss " + ", ".join(losses))
    progress.phase("counting launches", len(runs))
    for run in runs.values():
        run.count_launches(batches[0])
        progress.advance()


def prediction(run: Run, alone_ms: float) -> dict:
    """What the simulator expects of one forward and backward of ours, in milliseconds.

    ``program_order``: of the same graphs as traced. ``longer_alone``: of compute, as measured
    without a link (``alone_ms``), and communication, as the measured link has it; no order is
    shorter.
    """
    graphs = run.report.graphs
    communication_ms = sum(graph.after.communication_us for graph in graphs) / 1e3
    return {
        "compute_alone_ms": alone_ms,
        "communication_alone_ms": communication_ms,
        "longer_alone_ms": max(alone_ms, communication_ms),
        "program_order_ms": sum(graph.before.makespan_us for graph in graphs) / 1e3,
        "ours_ms": sum(graph.after.makespan_us for graph in graphs) / 1e3,
    }


def report_with_times(runs: dict[str, Run], measured: str) -> RunReport:
    """The report of our run, with the measured figures beside the simulated ones."""
    report = runs["ours"].report
    facts = [
        Fact(f"step, {name}, median", statistics.median(run.warm(run.times)), "ms", measured)
        for name, run in runs.items()
    ]
    facts += [Fact(f"loss, {name}", tuple(run.losses), "", measured) for name, run in runs.items()]
    return dataclasses.replace(report, facts=(*report.facts, *facts))


if __name__ == "__main__":
    main()
    leave_process()
