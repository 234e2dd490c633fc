"""Ranks on two hosts, joined by a slow link: upstream, upstream's reordering, and ours.

The ranks are real processes in network namespaces; the link between them is held to a rate by the
kernel (tc tbf; needs root). Programs: a chain of layers whose weights are gathered over the link,
and training of a small Llama with tensor and with data parallelism, and FSDP2 as it is, on one rank
a host, whose losses must be equal; at the rate of ``--both`` with both, on two ranks a host. With
tensor parallelism ours trains in parts too (``split_auto``, ``split_2``). Every run measures its
link first and is scheduled for it.

Times are milliseconds on the wall, variants in turn; ratios are of what stood in one turn, of the
slower rank. Predictions are the simulator's, on the link as measured and compute scaled to this
machine: by compute alone for the chain, and for training by a forward and backward whose
collectives end at once, so that the host's own time counts as compute. They are of forward and
backward; the optimizer is in the step alone.

usage: link.py [--rates 200mbit,1gbit,5gbit] [--rounds N] [--training RATES] [--parallel
                tensor,fsdp] [--both RATE] [--memory BUDGET ...] [--layers N] [--hidden N]
                [--steps N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test" / "support"))
from preloaded import SPOILT_HEAP

DEMO = Path(__file__).resolve().parent.parent / "demo" / "main.py"
RATES = "200mbit,1gbit,5gbit"
BATCH = ("--batch", "2", "--sequence", "128")
TRIES = 3
# What is of one run and says nothing about the link.
LEFT_OUT = ("losses", "report", "trace", "parameters", "step_ms_spread", "torch")


def main() -> int:
    """Run the programs at every rate, write what they measured; 1 if one failed or numbers
    differ.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--rounds", type=int, default=8, help="of the chain; 0 for none")
    parser.add_argument(
        "--training", default=RATES, help="rates of the training runs, which take long; '' for none"
    )
    parser.add_argument(
        "--both", default="1gbit", help="rate of the run on four ranks; '' for none"
    )
    parser.add_argument("--parallel", default="tensor,fsdp", help="of the training runs")
    parser.add_argument(
        "--memory", nargs="+", default=[], help="budgets of training runs beside, such as 64MiB"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument(
        "--steps",
        type=int,
        default=41,
        help="of each variant; one in four, and the first, is not timed",
    )
    parser.add_argument(
        "--out", default="", help="what stands in it already is kept, unless measured again"
    )
    args = parser.parse_args()
    start = time.monotonic()
    results = {
        "label": "real processes, emulated link",
        "torch": torch.__version__,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "rates": {},
    }
    if args.out and Path(args.out).exists():
        results["rates"] = json.loads(Path(args.out).read_text())["rates"]
    with tempfile.TemporaryDirectory(prefix="link_") as folder:
        for rate in args.rates.split(","):
            measured = {}
            if args.rounds:
                measured["chain"] = demo("--link", rate, "--rounds", str(args.rounds))
            for parallel in parallels(args, rate):
                # Without a link all rates are the same: measured once.
                alone = ("--alone", str(Path(folder) / f"{parallel}.json"))
                how = ["--steps", str(args.steps), "--parallel", parallel, "--out", folder]
                how += ["--layers", str(args.layers), "--hidden", str(args.hidden), *BATCH]
                how += ["--memory", *args.memory] if args.memory else []
                found = demo("--link", rate, "--train", *how, *alone)
                kept = {name: value for name, value in found.items() if name not in LEFT_OUT}
                measured[f"training, {parallel} parallel"] = kept
            results["rates"].setdefault(rate, {}).update(measured)
            results["seconds"] = time.monotonic() - start
            if args.out:
                Path(args.out).write_text(json.dumps(results, indent=2) + "\n")
            for name, found in measured.items():
                print(f"{rate:8} {name:26}", found.get("step_ms", found), flush=True)
    return 0 if all(m["ok"] for rate in results["rates"].values() for m in rate.values()) else 1


def parallels(args: argparse.Namespace, rate: str) -> list[str]:
    """The ways to train at a rate."""
    found = args.parallel.split(",") if rate in args.training.split(",") else []
    return [*found, "both"] if rate == args.both else found


def demo(*arguments: str) -> dict:
    """What the demo prints for these arguments; ``{"ok": False, "error": ...}`` if it fails.

    A rank that gloo ended says nothing about the plugin: the demo is run again then, and
    ``aborted_in_gloo`` counts it.
    """
    for aborted in range(TRIES):
        load = os.getloadavg()[0]
        done = subprocess.run(
            [sys.executable, str(DEMO), *arguments, "--json"], capture_output=True, text=True
        )
        print(done.stderr, file=sys.stderr, flush=True)
        if done.stdout.strip():
            found = json.loads(done.stdout)
            return {**found, "load_average": load, "aborted_in_gloo": aborted}
        if not SPOILT_HEAP.search(done.stderr):
            break
    return {"ok": False, "error": done.stderr.strip()[-2000:]}


if __name__ == "__main__":
    sys.exit(main())
