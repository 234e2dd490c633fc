"""Two gloo ranks on two hosts, joined by a slow link: stock, stock's reordering, and ours.

The ranks are real processes in network namespaces; the link between them is held to a rate by the kernel
(tc tbf; needs root). Three programs: a chain of layers whose weights are gathered over the link, and
training runs of a small Llama with tensor and with data parallelism, whose losses must be equal. All times are
milliseconds on the wall, variants in turn; beside those of the chain stand the simulator's, which knows
compute alone and communication alone. The exposed times beside those of training are simulated too.

usage: link.py [--rates 200mbit,1gbit,5gbit] [--rounds N] [--training 1gbit] [--steps N] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

DEMO = Path(__file__).resolve().parent.parent / "demo" / "main.py"
RATES = "200mbit,1gbit,5gbit"


def main() -> int:
    """Run the programs at every rate, write what they measured; 1 if one failed or numbers differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument(
        "--training", default=RATES, help="rates of the training runs, which take long; '' for none"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    results = {
        "label": "real processes, emulated link",
        "torch": torch.__version__,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg()[0],
        "rates": {},
    }
    for rate in args.rates.split(","):
        chain = demo("--link", rate, "--rounds", str(args.rounds))
        measured = {"chain": chain}
        if rate in args.training.split(","):
            sizes = ("--layers", "2", "--hidden", "256", "--batch", "2", "--sequence", "128")
            how = ("--link", rate, "--train", "--steps", str(args.steps), *sizes)
            measured["training"] = demo(*how)
            measured["training, data parallel"] = demo(*how, "--parallel", "data")
        results["rates"][rate] = measured
        if args.out:
            Path(args.out).write_text(json.dumps(results, indent=2) + "\n")
        print(f"{rate:8}", json.dumps(chain.get("step_ms")), flush=True)
    return 0 if all(m["ok"] for rate in results["rates"].values() for m in rate.values()) else 1


def demo(*arguments: str) -> dict:
    """What the demo prints for these arguments; ``{"ok": False, "error": ...}`` if it fails."""
    done = subprocess.run(
        [sys.executable, str(DEMO), *arguments, "--json"], capture_output=True, text=True
    )
    try:
        return json.loads(done.stdout)
    except ValueError:
        return {"ok": False, "error": done.stderr.strip()[-2000:]}


if __name__ == "__main__":
    sys.exit(main())
