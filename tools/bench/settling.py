#!/usr/bin/env python
"""How much longer is the first step because ranks settle on one order of launches?

    python tools/bench/settling.py [--turns N] [--layers N] [--json FILE]

Two real gloo ranks compile a data parallel stack of layers and take its first training step, with ranks that settle and
without (``DYNAMO_DIST_AGREEMENT_SECONDS=0``: the program's order, nothing merged), in turns, each in fresh processes
with an empty compile cache. Printed are the medians of the first step's seconds on the slower rank, their
difference, and the seconds that passed inside of settling: the passes' own work, the store's operations, waiting for one
another. With passes that merge, Inductor also compiles the copies into and out of buckets, which =0 does not have;
with ``--as-written`` no pass changes a launch, so that the difference is that of settling alone. Times are this machine's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

AS_WRITTEN = {"schedule": "off", "disable": ["bucket_averages", "merge_tiny"]}


def worker(layers: int, as_written: bool) -> None:
    """One rank: the seconds of its first step, on stdout."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from inductor_passes.agree.orders import Orders
    from inductor_passes.testing import leave_process

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*[nn.Linear(64, 64) for _ in range(layers)])
    model = DistributedDataParallel(model)
    options = AS_WRITTEN if as_written else {}
    compiled = torch.compile(model, backend="dynamo_dist", options=options)
    inside, decide = [0.0], Orders.decide

    def timed(*args: Any) -> Any:
        start = time.perf_counter()
        try:
            return decide(*args)
        finally:
            inside[0] += time.perf_counter() - start

    Orders.decide = timed  # type: ignore[method-assign]
    dist.barrier()
    start = time.perf_counter()
    compiled(torch.randn(16, 64)).sum().backward()
    line = f"first step {time.perf_counter() - start} {inside[0]}\n"
    print(line, end="", flush=True)  # at once: ranks share the pipe
    dist.barrier()
    leave_process()


def first_step(layers: int, seconds: str, as_written: bool) -> tuple[float, float]:
    """Seconds of the slower rank's first step, and of them in settling, in fresh processes."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nproc-per-node=2", "--standalone", __file__),
                *("--worker", "--layers", str(layers)),
                *(["--as-written"] if as_written else []),
            ],
            env={
                **os.environ,
                "DYNAMO_DIST_AGREEMENT_SECONDS": seconds,
                "TORCHINDUCTOR_CACHE_DIR": cache,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
            },
            capture_output=True,
            text=True,
            check=True,
            timeout=600,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith("first step")]
    found = [[float(word) for word in line.split()[-2:]] for line in lines]
    return max(step for step, _ in found), max(inside for _, inside in found)


def main() -> None:
    """Measure in turns and print medians."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--as-written", action="store_true", help="no pass changes a launch")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.layers, options.as_written)
        return
    import torch

    taken: dict[str, list[float]] = {"settled": [], "program": []}
    inside: list[float] = []
    for turn in range(options.turns):
        for name, seconds in (("settled", "30"), ("program", "0")):
            step, settling = first_step(options.layers, seconds, options.as_written)
            taken[name].append(step)
            inside += [settling] * (name == "settled")
            print(f"turn {turn + 1} of {options.turns}: {name} {taken[name][-1]:.2f} s", flush=True)
    medians = {name: statistics.median(found) for name, found in taken.items()}
    result = {
        "torch": torch.__version__,
        "layers": options.layers,
        "as_written": options.as_written,
        "first_step_s": taken,
        "median_s": medians,
        "inside_s": inside,
        "difference_s": medians["settled"] - medians["program"],
    }
    print(
        f"first step {medians['settled']:.2f} s settled, {medians['program']:.2f} s not: "
        f"{result['difference_s']:+.2f} s, of which {statistics.median(inside):.2f} s are settling"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
