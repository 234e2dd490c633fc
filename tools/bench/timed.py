"""Wall-clock of compiled training steps on a timed process group, beside the simulator's prediction.

One process claims to be rank 0 of eight. Kernels are real, links are modelled: a collective takes its
time on its group's channel and burns no CPU (timed_group.py). Time is, by default, that
of the computing thread plus what it waits, so that other work on the machine does not count; with
--clock wall it is the time on the wall. Variants: stock Inductor, stock
with its opt-in reordering, and ours, at three rates of the link.

The cost model's compute rates are scaled once, so that the step without link time is as long as
measured; predictions then show what the simulator makes of links and order. The variants take turns, and
each measurement is divided by the link-free step of its round, so that a busy machine slows all alike.

usage: timed.py [--rounds N] [--clock thread|wall] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from rescale import write_rescaled
from timed_group import ThreadClock, WallClock, link_time, timed_group

import inductor_passes
from inductor_passes.machine import load_topology
from inductor_passes.machine.prices.alpha_beta import collective_us
from inductor_passes.machine.prices.group_shape import GroupShape
from inductor_passes.machine.topology.topology import Topology
from inductor_passes.records import GraphRecord
from inductor_passes.reporting import recorder

WORLD = 8
LAYERS, WIDTH, ROWS = 6, 512, 512
PROGRAM = (
    f"{LAYERS} layers of relu(x @ gather(w)), w {WIDTH} x {WIDTH} fp32 in {WORLD} shards, trained"
)
# Link time of all collectives as a multiple of the compute time of the step.
LOADS = (0.5, 1.0, 2.0)
STOCK_REORDER = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
}
WARM_UP = 2


def loss(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    """Fully sharded layers: a gather for each weight, a reduce-scatter for each gradient."""
    for shard in shards:
        whole = fc.all_gather_tensor_autograd(shard, 0, dist.group.WORLD)
        x = torch.relu(x @ whole)
    return x.sum()


def main() -> int:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clock", choices=("thread", "wall"), default="thread")
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    with (
        timed_group(
            WORLD,
            lambda kind, payloads, ranks: 0.0,
            clock=ThreadClock() if args.clock == "thread" else WallClock(),
        ) as clock,
        tempfile.TemporaryDirectory() as work,
    ):
        results = {"clock": args.clock, **measure(args.rounds, Path(work), clock)}
    for row in results["rows"]:
        print(
            f"{row['link_gb_per_s']:7.3f} GB/s  {row['variant']:14} measured {row['measured']:.3f}"
            + ("" if row["predicted"] is None else f"  predicted {row['predicted']:.3f}")
            + f"  (steps without link = 1; quartiles {row['quartiles'][0]:.3f} to {row['quartiles'][1]:.3f})"
        )
    print(f"median error of the prediction: {results['median_error']:.1%}")
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=2) + "\n")
    return 0


def measure(rounds: int, work: Path, clock: WallClock) -> dict:
    """Times of all variants at all rates, in turn, as multiples of the step without link time."""
    predicted_us, link_us = simulated_step(load_topology("cpu-gloo"))
    with recorder.records_of_block():  # what a warm cache brings back is not taken for ours below
        free = step_of(loss, {"schedule": "off", "topology": "cpu-gloo"})
    measured_us = statistics.median(timed(free, clock) for _ in range(9))
    slower = measured_us / predicted_us
    runs: list[tuple[float, str, Callable[[], None], Topology, list[GraphRecord]]] = []
    stock = step_of(loss, None)
    reordered = step_of(loss, STOCK_REORDER)
    for load in LOADS:
        factor = load * measured_us / link_us
        path = work / f"timed{factor:.4f}.json"
        name = f"timed-{factor:.4f}"
        write_rescaled("cpu-gloo", path, name=name, compute=slower, links=factor)
        topology = load_topology(path)
        with recorder.records_of_block() as records:
            ours = step_of(loss, {"topology": str(path)})
        for variant, step in (("stock", stock), ("stock reorder", reordered), ("ours", ours)):
            runs.append((load, variant, step, topology, records))
    ratios: dict[tuple[float, str], list[float]] = {(load, name): [] for load, name, *_ in runs}
    for _ in range(rounds):
        alone = timed(free, clock)
        for load, variant, step, topology, _ in runs:
            with link_time(link_of(topology)):
                ratios[load, variant].append(timed(step, clock) / alone)
    rows, errors = [], []
    for load, variant, _, topology, records in runs:
        measured = statistics.median(ratios[load, variant])
        which = {"stock": "before", "ours": "after"}.get(variant)
        predicted = None
        if which is not None:
            predicted = sum(getattr(r, which).makespan_us for r in records) / measured_us
            errors.append(abs(predicted / measured - 1))
        low, _, high = statistics.quantiles(ratios[load, variant], n=4, method="inclusive")
        rows.append(
            {
                "link_over_compute": load,
                "link_gb_per_s": topology.intra_gb_per_s,
                "variant": variant,
                "measured": measured,
                "quartiles": [low, high],
                "predicted": predicted,
            }
        )
    return {
        "label": "real kernels on one CPU core, modelled links",
        "program": PROGRAM,
        "world_size": WORLD,
        "torch": torch.__version__,
        "unit": "steps without link time",
        "step_without_link_ms": measured_us / 1e3,
        "rounds": rounds,
        "rows": rows,
        "median_error": statistics.median(errors),
    }


def simulated_step(topology: Topology) -> tuple[float, float]:
    """Compute and link microseconds of one step, as the model has them."""
    with recorder.records_of_block() as records:
        step_of(loss, {"schedule": "off", "disable": ["pin_order"], "topology": topology.name})
    return (
        sum(record.before.compute_us for record in records),
        sum(record.before.communication_us for record in records),
    )


def step_of(fn: Callable[..., torch.Tensor], options: dict | None) -> Callable[[], None]:
    """One training step of ``fn``, compiled by stock or, with options of ours, by us; warmed up."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = torch.rand(ROWS, WIDTH)
    shards = [(torch.rand(WIDTH // WORLD, WIDTH) / WIDTH).requires_grad_() for _ in range(LAYERS)]
    own = options is not None and ("topology" in options or "schedule" in options)
    compiled = torch.compile(
        fn, fullgraph=True, options=inductor_passes.options(options) if own else options
    )

    def step() -> None:
        compiled(x, shards).backward()
        for shard in shards:
            shard.grad = None

    for _ in range(WARM_UP):
        step()
    return step


def timed(step: Callable[[], None], clock: WallClock) -> float:
    """Microseconds of one step."""
    start = clock.now()
    step()
    return 1e6 * (clock.now() - start)


def link_of(topology: Topology) -> Callable[..., float]:
    """The link time that the cost model of this topology has."""

    def us(kind: str, payloads: list[int], ranks: tuple[int, ...]) -> float:
        shape = GroupShape(len(ranks), 1)
        return sum(collective_us(kind, p, shape, topology) for p in payloads)

    return us


if __name__ == "__main__":
    sys.exit(main())
