"""One rank of the demo: the same training run eager, under stock Inductor and under dynamo_dist.

Started by ``training.py`` through torchrun, or by ``link.py`` in a network namespace. Writes what it
measured and its report to ``rank<R>.json`` in the work folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from data import Sizes, load_sharded, text_batches
from progress import Progress

from dynamo_dist._torch import unique_graphs
from dynamo_dist.comparing.measure import launches_counted
from dynamo_dist.comparing.records import VARIANTS, VariantResult
from dynamo_dist.comparing.variants import break_count, compiled, plugin_for, simulated
from dynamo_dist.reporting import Fact, RunReport, collect

LEARNING_RATE = 1e-3
# The first step compiles, the second still fills caches.
UNTIMED_STEPS = 2


@dataclasses.dataclass
class Training:
    """One variant's run: loss after each step, and what a comparison records."""

    losses: list[float]
    result: VariantResult
    report: RunReport | None = None

    def to_json(self) -> dict:
        """Plain JSON types."""
        return {"losses": self.losses, **self.result.to_json()}


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
        options = {"topology": args.topology} if args.topology else {}
        runs = {
            variant: train(variant, work / "checkpoint", sizes, args.steps, options, progress)
            for variant in VARIANTS
        }
        data = {"rank": rank, "variants": {name: run.to_json() for name, run in runs.items()}}
        data["report"] = report_with_times(runs, args.measured).to_json()
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
    parser.add_argument("--topology", default="")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--timeout", type=int, required=True)
    parser.add_argument("--measured", required=True, help="what the times are times of")
    for field in dataclasses.fields(Sizes):
        parser.add_argument(f"--{field.name}", type=int, default=field.default)
    return parser.parse_args()


def train(
    variant: str, checkpoint: Path, sizes: Sizes, steps: int, options: dict, progress: Progress
) -> Training:
    """Load the checkpoint, train for ``steps`` steps and count the launches of one more."""
    progress.phase(f"{variant}: training", steps)
    batches = text_batches(sizes, steps)
    model = load_sharded(checkpoint)
    # foreach=False: tensor parallelism leaves norms plain, and a list may not mix them with DTensors.
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    losses: list[float] = []
    times: list[float] = []
    graphs = unique_graphs()
    with plugin_for(variant), collect() as collector:
        torch.compiler.reset()
        fn = compiled(model, variant, options)
        for batch in batches:
            start = time.perf_counter()
            loss = fn(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            times.append(1e3 * (time.perf_counter() - start))
            progress.advance(f"loss {losses[-1]:.4f}")
        with launches_counted() as launches:
            fn(input_ids=batches[0], labels=batches[0], use_cache=False).loss.backward()
    timed = times[min(UNTIMED_STEPS, steps - 1) :]
    result = VariantResult(
        variant,
        graphs=unique_graphs() - graphs,
        graph_breaks=break_count(collector),
        launches=dict(launches),
        first_s=times[0] / 1e3,
        step_ms=tuple(timed),
        simulated=simulated(collector.graphs),
    )
    return Training(losses, result, collector.report() if variant == "ours" else None)


def report_with_times(runs: dict[str, Training], measured: str) -> RunReport:
    """The report of our run, with the measured figures beside the simulated ones."""
    report = runs["ours"].report
    assert report is not None
    facts = [
        Fact(f"step, {name}, median", run.result.step_ms_median, "ms", measured)
        for name, run in runs.items()
    ]
    facts += [Fact(f"loss, {name}", tuple(run.losses), "", measured) for name, run in runs.items()]
    return dataclasses.replace(report, facts=(*report.facts, *facts))


if __name__ == "__main__":
    main()
