"""Question: what does ``dynamo_dist.tune`` make of a topology that is wrong, and how good are predictions after it?

    python tools/bench/tuned.py --rounds 12 --out tools/bench/results/tuned.json

Real processes, gloo over this host's loopback: no link is emulated. Layers of relu(x @ gather(w)), trained, on ``--ranks``
ranks, with the shipped topology as it is and with its rates of links, its floors or its compute wrong by ``--wrong``
times. For each the untuned step is timed, then ``tune`` runs, then the tuned step; errors are of the predicted time of all
compiled graphs on steps that no cost is from. On a machine that others use, ratios spread: quartiles are given.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.multiprocessing as mp

LAYERS, WIDTH, ROWS = 6, 512, 512
PROGRAM = f"{LAYERS} layers of relu(x @ gather(w)), w {WIDTH} x {WIDTH} fp32, {ROWS} rows, trained"
BASE = "cpu-gloo"


def main() -> int:
    """Run every case on fresh ranks, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12, help="steps timed before and after")
    parser.add_argument("--wrong", type=float, default=4.0)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    results: dict[str, Any] = {
        "label": "real processes, loopback, a machine that others used",
        "command": f"python tools/bench/tuned.py --ranks {args.ranks} --rounds {args.rounds}",
        "program": PROGRAM,
        "torch": torch.__version__,
        "ranks": args.ranks,
        "cores": os.cpu_count(),
        "wrong": args.wrong,
        "cases": {},
    }
    with tempfile.TemporaryDirectory() as work:
        for number, case in enumerate(("as shipped", "rate", "floor", "compute")):
            path = topology(Path(work), case, args.wrong)
            out = Path(work) / f"{number}.json"
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(work) / f"cache{number}")
            os.environ["MASTER_PORT"] = str(29640 + number)
            mp.start_processes(
                rank_of_case,
                (args.ranks, path, args.rounds, str(out)),
                nprocs=args.ranks,
                start_method="spawn",
            )
            results["cases"][case] = found = json.loads(out.read_text())
            print(case, found, flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(results, indent=2) + "\n")
    return 0


def topology(work: Path, case: str, wrong: float) -> str:
    """The shipped topology's name, or the path of one that says a part of the machine is ``wrong`` times as fast."""
    from inductor_passes.machine.topology.rescale import write_rescaled
    from inductor_passes.machine.topology.topology import topology_text

    if case == "as shipped":
        return BASE
    path = work / f"wrong_{case}.json"
    if case == "compute":
        write_rescaled(BASE, path, name=f"wrong-{case}", compute=1 / wrong)
        return str(path)
    content = json.loads(topology_text(BASE))
    content["name"] = f"wrong-{case}"
    links = content["links"]
    if case == "rate":
        links["intra_node_gb_per_s"]["value"] *= wrong
    for protocol in links["protocols"] if case == "floor" else ():
        protocol["launch_us"]["value"] *= wrong
        protocol["intra_node"]["step_us"]["value"] *= wrong
    path.write_text(json.dumps(content))
    return str(path)


def rank_of_case(rank: int, ranks: int, topology: str, rounds: int, out: str) -> None:
    """One rank of one case."""
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    import dynamo_dist
    from inductor_passes.testing import leave_process

    torch.manual_seed(rank)
    x = torch.rand(ROWS, WIDTH)
    shards = [(torch.rand(WIDTH // ranks, WIDTH) / WIDTH).requires_grad_() for _ in range(LAYERS)]

    def loss() -> torch.Tensor:
        value = x
        for shard in shards:
            value = torch.relu(value @ fc.all_gather_tensor_autograd(shard, 0, dist.group.WORLD))
        return value.sum()

    compiled = torch.compile(loss, backend="dynamo_dist", options={"topology": topology})

    def step() -> None:
        compiled().backward()
        for shard in shards:
            shard.grad = None

    for _ in range(3):
        step()
    before = timed(step, rounds)
    report = dynamo_dist.tune(step, steps=max(2, rounds))
    after = timed(step, rounds)
    if rank == 0:
        ratio = statistics.median(after) / statistics.median(before)
        found = {
            "decision": report.decision,
            "before_ms": quartiles(before),
            "after_ms": quartiles(after),
            "ratio": ratio,
            "prediction_error_before": report.error_before,
            "prediction_error_after": report.error_after,
            "recompiles": report.recompiles,
            "recompile_s": report.recompile_s,
            "compute_stretch": report.compute_stretch,
            "launch_stretch": report.launch_stretch,
            "load_average": os.getloadavg()[0],
        }
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    leave_process()


def timed(step: Any, rounds: int) -> list[float]:
    """Milliseconds of steps that all ranks begin together."""
    found = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        step()
        found.append(1e3 * (time.perf_counter() - start))
    return found


def quartiles(values: list[float]) -> list[float]:
    """The three quartiles."""
    return [round(q, 3) for q in statistics.quantiles(values, n=4, method="inclusive")]


if __name__ == "__main__":
    sys.exit(main())
