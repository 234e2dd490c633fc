"""One rank of ``--link``: a chain of sharded layers, whose weights are gathered over the link.

The variants take turns, so that a busy machine slows all of them alike. Compute alone,
communication alone, and both at once with nothing to wait for, show what overlap could reach on
this machine. The first, and the link's collectives, are measured once before and go into the cost
model; its predictions stand beside the measurements.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from own_machine import agreed_ms, write_topology
from progress import Progress

from dynamo_dist.diagnostics import collect
from dynamo_dist.numerics.comparison import compiled, plugin_for
from dynamo_dist.torch_compat.dynamo_compiler import unique_graphs
from inductor_passes.records import GraphRecord
from inductor_passes.testing import leave_process

LAYERS, WIDTH, ROWS = 8, 1024, 512
PROGRAM = f"{LAYERS} layers of relu(x @ gather(w)), w {WIDTH} x {WIDTH} fp32 in two shards"
# Upstream's own way to move launches up and waits down; off by default.
UPSTREAM_REORDER = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
}
WARM_UP = 3
CALIBRATION_ROUNDS = 5
# Older torch knows the second name only.
gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor


def chain(x: torch.Tensor, shards: list[torch.Tensor]) -> torch.Tensor:
    """Each layer needs its weight whole: [WIDTH, WIDTH] from this rank's half of the rows."""
    for shard in shards:
        x = torch.relu(x @ gather(shard, 0, dist.group.WORLD)) * 0.05
    return x


def compute_alone(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """The same without a link: weights are whole already."""
    for weight in weights:
        x = torch.relu(x @ weight) * 0.05
    return x


def communicate(shards: list[torch.Tensor]) -> Callable[[], None]:
    """Launch every layer's gather; what is returned waits for all of them."""
    launched = [gather(shard, 0, dist.group.WORLD) for shard in shards]

    def wait() -> None:
        for weight in launched:
            funcol.wait_tensor(weight)

    return wait


def main() -> None:
    """Compile every variant, time them in turn, write the times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--timeout", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=args.timeout))
    rank = dist.get_rank()
    (Path(args.work) / f"rank{rank}.pid").write_text(str(os.getpid()))
    progress = Progress(show=rank == 0)
    try:
        with torch.no_grad():
            result = measure(rank, args.rounds, Path(args.work), progress)
        (Path(args.work) / f"rank{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        progress.close()
        dist.destroy_process_group()


def measure(rank: int, rounds: int, work: Path, progress: Progress) -> dict:
    """Milliseconds of each round of each variant on this rank, and whether their results agree."""
    torch.manual_seed(rank)
    shards = [torch.randn(WIDTH // dist.get_world_size(), WIDTH) for _ in range(LAYERS)]
    weights = [torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)]
    x = torch.randn(ROWS, WIDTH)
    variants: dict[str, tuple[str, Callable[[], object]]] = {}

    def add(name: str, state: str, call: Callable[[], object]) -> None:
        progress.phase(f"{name}: compiling", WARM_UP)
        with plugin_for(state):
            for _ in range(WARM_UP):
                call()
                progress.advance()
        variants[name] = (state, call)

    compute = torch.compile(compute_alone)
    add("compute", "upstream", lambda: compute(x, weights))
    add("communication", "upstream", lambda: communicate(shards)())

    def both() -> None:
        wait = communicate(shards)
        compute(x, weights)
        wait()

    add("both", "upstream", both)
    rounds_alone = [timed(variants["compute"][1], {}, "") for _ in range(CALIBRATION_ROUNDS)]
    topology = link_topology(agreed_ms(statistics.median(rounds_alone)), x, shards, work)

    for name, fn in (
        ("upstream", compiled(chain, "upstream")),
        ("upstream_reorder", torch.compile(chain, options=UPSTREAM_REORDER)),
    ):
        add(name, "upstream", lambda fn=fn: fn(x, shards))
    with collect() as collector:
        with plugin_for("ours"):
            ours = compiled(chain, "ours", {"topology": str(topology)})
        add("ours", "ours", lambda: ours(x, shards))

    graphs = unique_graphs()
    times: dict[str, list[float]] = {name: [] for name in variants}
    results = {}
    progress.phase("timing", rounds)
    order = list(variants.items())
    for _ in range(rounds):
        order.append(order.pop(0))  # none always follows the same one
        for name, (state, call) in order:
            with plugin_for(state):
                times[name].append(timed(call, results, name))
        progress.advance(", ".join(f"{name} {times[name][-1]:.0f} ms" for name in times))
    return {
        "program": PROGRAM,
        "ms": times,
        "equal": torch.equal(results["upstream"], results["ours"]),
        "recompiles": unique_graphs() - graphs,
        "order_kept": all(graph.order_kept for graph in collector.graphs),
        "predicted_ms": predictions(collector.graphs),
    }


def timed(call: Callable[[], object], results: dict[str, object], name: str) -> float:
    """Milliseconds of one call that all ranks start together; what it returns goes into
    ``results``.
    """
    dist.barrier()
    start = time.perf_counter()
    results[name] = call()
    return 1e3 * (time.perf_counter() - start)


def link_topology(
    compute_ms: float, x: torch.Tensor, shards: list[torch.Tensor], work: Path
) -> Path:
    """This machine and this link as a topology file, by what compute takes alone."""
    with collect() as collector, plugin_for("ours"):
        compiled(chain, "ours", {"topology": "cpu-gloo"})(x, shards)
    modelled_us = sum(graph.before.compute_us for graph in collector.graphs)
    path = work / "link.json"
    write_topology(path, compute=1e3 * compute_ms / modelled_us, kinds=("all_gather", "all_reduce"))
    return path


def predictions(graphs: list[GraphRecord]) -> dict[str, float]:
    """Milliseconds that the simulator expects of upstream's order and of ours."""
    return {
        "upstream": sum(graph.before.makespan_us for graph in graphs) / 1e3,
        "ours": sum(graph.after.makespan_us for graph in graphs) / 1e3,
    }


if __name__ == "__main__":
    main()
    leave_process()
