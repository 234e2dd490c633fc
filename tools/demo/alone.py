"""One rank of the training run without a link: its collectives end at once, and carry no numbers.

What our forward and backward take then is compute and the host's own time, which the simulator
takes for compute. The ranks run side by side, as they do on the link, and meet in files.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

import torch
from data import Sizes, mesh_of, share_of, text_batches
from own_machine import Alone
from progress import Progress
from train import TURN_STEPS, Run, parse

from inductor_passes.testing import leave_process

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from timed_group import timed_group

TURNS = 5


def main() -> None:
    """Compile, wait for the others, time, write ``alone<R>.json``."""
    args = parse()
    work, rank, ranks = Path(args.work), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    (work / f"rank{rank}.pid").write_text(str(os.getpid()))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # What these collectives hand out is what memory held; some of it would be slow to compute with.
    torch.set_flush_denormal(True)
    progress = Progress(show=rank == 0)
    with timed_group(ranks, lambda kind, payloads, group: 0.0, rank=rank):
        mesh = mesh_of(args.parallel)
        sizes = Sizes(args.layers, args.hidden, args.batch, args.sequence)
        batches = [share_of(b, args.parallel, mesh) for b in text_batches(sizes, TURN_STEPS)]
        progress.phase("without a link: compiling")
        run = Run(
            "ours", "ours", work / "checkpoint", {"topology": "cpu-gloo"}, args.parallel, mesh
        )
        run.turn(batches[:1])
        progress.phase("without a link", TURNS)
        for turn in range(TURNS):
            meet(work, f"turn{turn}_", ranks, args.timeout)
            run.turn(batches)
            progress.advance()
    progress.close()
    modelled_us = sum(graph.before.compute_us for graph in run.report.graphs)
    Alone(statistics.median(run.warm(run.gradient_times)), modelled_us / 1e3).write(
        work / f"alone{rank}.json"
    )


def meet(work: Path, name: str, ranks: int, timeout_s: float) -> None:
    """Return when every rank has come here."""
    (work / f"{name}{os.environ['RANK']}").touch()
    end = time.monotonic() + timeout_s
    while not all((work / f"{name}{rank}").exists() for rank in range(ranks)):
        if time.monotonic() > end:
            raise TimeoutError(f"a rank did not come to {name} within {timeout_s:.0f} s")
        time.sleep(0.001)


if __name__ == "__main__":
    main()
    leave_process()
