"""The training run: its checkpoint, its ranks, what they measured."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import launch
import show
from data import PARALLEL, Sizes, environment, write_checkpoint
from own_machine import Alone

from dynamo_dist.diagnostics.merge import merge_ranks
from dynamo_dist.diagnostics.records import RunReport
from dynamo_dist.diagnostics.render import write_report

HERE = Path(__file__).resolve().parent
MEASURED = "real, CPU, gloo"

# Takes the worker's script and arguments, the work folder and how many ranks; runs them to their
# end.
Launcher = Callable[[Path, list[str], Path, int], None]


def run(args: argparse.Namespace, start: Launcher | None = None, measured: str = MEASURED) -> int:
    """Write the checkpoint, run the ranks, show what they measured; 0 if the losses agree."""
    sizes = Sizes(args.layers, args.hidden, args.batch, args.sequence)
    work = Path(tempfile.mkdtemp(prefix="dynamo_dist_demo_"))
    try:
        print(f"{sizes}: writing a random checkpoint ...", file=sys.stderr, flush=True)
        parameters = write_checkpoint(work / "checkpoint", sizes)
        arguments = ["--topology", args.topology, "--steps", str(args.steps)]
        arguments += ["--parallel", args.parallel]
        arguments += ["--timeout", str(args.timeout), "--measured", measured]
        arguments += ["--memory", *args.memory] if args.memory else []
        for field in fields(Sizes):
            arguments += [f"--{field.name}", str(getattr(sizes, field.name))]
        _, count = PARALLEL[args.parallel]
        if args.link:
            arguments += ["--alone", str(compute_alone(args, start, arguments, work, count))]
        print(f"starting {count} ranks ({measured}) ...", file=sys.stderr, flush=True)
        (start or on_this_host(args.deadline))(HERE / "train.py", arguments, work, count)
        ranks = rank_files(work, count)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    report = merge_ranks([RunReport.from_json(rank["report"]) for rank in ranks])
    written = write_report(report, Path(args.out).resolve())
    results = show.training_results(ranks, sizes, parameters, written)
    results["measured"] = measured
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        show.training(results)
    return 0 if results["ok"] else 1


def compute_alone(
    args: argparse.Namespace, start: Launcher, arguments: list[str], work: Path, count: int
) -> Path:
    """What a step takes without a link, by ``alone.py``: read from ``--alone`` if an earlier run
    left it there.
    """
    path = Path(args.alone or work / "alone.json")
    if Alone.read(str(path)) is None:
        start(HERE / "alone.py", arguments, work, count)
        ranks = [Alone.read(str(work / f"alone{rank}.json")) for rank in range(count)]
        max((rank for rank in ranks if rank), key=lambda rank: rank.ms).write(path)
    return path


def on_this_host(deadline_s: float) -> Launcher:
    """Ranks by torchrun, joined by the loopback device."""

    def start(script: Path, arguments: list[str], work: Path, ranks: int) -> None:
        variables = environment()
        if sys.platform == "linux":
            # A host name that does not resolve would stop gloo.
            variables.setdefault("GLOO_SOCKET_IFNAME", "lo")
        command = launch.torchrun(script, ["--work", str(work), *arguments], ranks)
        launch.watch([command], [variables], work, deadline_s)

    return start


def rank_files(work: Path, ranks: int) -> list[dict]:
    """What each rank wrote, in rank order."""
    return [json.loads((work / f"rank{rank}.json").read_text()) for rank in range(ranks)]
