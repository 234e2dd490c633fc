"""One rank of ``--link``: a chain of sharded layers, whose weights are gathered over the link.

The variants take turns, so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from progress import Progress

from dynamo_dist.comparing._torch import unique_graphs
from dynamo_dist.comparing.variants import compiled, plugin_for, simulated
from dynamo_dist.reporting import collect
from inductor_passes.testing import leave_process

LAYERS, WIDTH, ROWS = 8, 1024, 512
PROGRAM = f"{LAYERS} layers of relu(x @ gather(w)), w {WIDTH} x {WIDTH} fp32 in two shards"
# Stock's own way to move launches up and waits down; off by default.
STOCK_REORDER = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
}
WARM_UP = 3
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
            result = measure(rank, args.rounds, progress)
        (Path(args.work) / f"rank{rank}.json").write_text(json.dumps(result))
        dist.barrier()
    finally:
        progress.close()
        dist.destroy_process_group()


def measure(rank: int, rounds: int, progress: Progress) -> dict:
    """Milliseconds of each round of each variant on this rank, and whether their results agree."""
    torch.manual_seed(rank)
    shards = [torch.randn(WIDTH // dist.get_world_size(), WIDTH) for _ in range(LAYERS)]
    weights = [torch.randn(WIDTH, WIDTH) for _ in range(LAYERS)]
    x = torch.randn(ROWS, WIDTH)
    variants: dict[str, tuple[str, Callable[[], torch.Tensor]]] = {}

    def add(name: str, state: str, fn: Callable[..., torch.Tensor], given: list) -> None:
        def call() -> torch.Tensor:
            return fn(x, given)

        progress.phase(f"{name}: compiling", WARM_UP)
        with plugin_for(state):
            for _ in range(WARM_UP):
                call()
                progress.advance()
        variants[name] = (state, call)

    add("compute", "stock", torch.compile(compute_alone), weights)
    add("stock", "stock", compiled(chain, "stock"), shards)
    add("stock_reorder", "stock", torch.compile(chain, options=STOCK_REORDER), shards)
    with collect() as collector:
        with plugin_for("ours"):
            ours = compiled(chain, "ours")
        add("ours", "ours", ours, shards)

    graphs = unique_graphs()
    times: dict[str, list[float]] = {name: [] for name in variants}
    results = {}
    progress.phase("timing", rounds)
    order = list(variants.items())
    for _ in range(rounds):
        order.append(order.pop(0))  # none always follows the same one
        for name, (state, call) in order:
            with plugin_for(state):
                dist.barrier()
                start = time.perf_counter()
                results[name] = call()
                times[name].append(1e3 * (time.perf_counter() - start))
        progress.advance(", ".join(f"{name} {times[name][-1]:.0f} ms" for name in times))
    predicted = simulated(collector.graphs)
    return {
        "program": PROGRAM,
        "ms": times,
        "equal": torch.equal(results["stock"], results["ours"]),
        "recompiles": unique_graphs() - graphs,
        "order_kept": all(graph.order_kept for graph in collector.graphs),
        "topology": predicted.topology if predicted else None,
        "exposed_us_before": predicted.exposed_us_before if predicted else None,
        "exposed_us_after": predicted.exposed_us_after if predicted else None,
    }


if __name__ == "__main__":
    main()
    leave_process()
