"""What enabling costs eager's dispatch of DTensors that stock handles well: a ratio, in one process.

    python tools/bench/dispatch_overhead.py [--json]

A chain of operators on DTensors of a fake group of 8 ranks, cached decisions, stock and enabled in turn.
Writes tools/bench/results/dispatch_overhead.json. Baseline: the same calls before ``enable()``. Times depend on
what else the machine does; the number of calls that Python makes in the chain does not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dynamo_dist
from dynamo_dist.testing import fake_mesh

RESULT = Path(__file__).parent / "results" / "dispatch_overhead.json"
TURNS, CALLS = 15, 150


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Eight dispatches: a product, sums, a view, a reduction and pointwise operators."""
    y = torch.relu(x @ w) + x
    return (y * 2).view(16, 4, 16).sum(-1).sigmoid().neg()


def microseconds(x: torch.Tensor, w: torch.Tensor) -> float:
    """Of one call of the chain, decisions cached."""
    for _ in range(20):
        chain(x, w)
    start = time.thread_time()
    for _ in range(CALLS):
        chain(x, w)
    return (time.thread_time() - start) / CALLS * 1e6


def python_calls(x: torch.Tensor, w: torch.Tensor) -> int:
    """Functions that Python calls, its own and those in C, in one call of the chain."""
    for _ in range(20):
        chain(x, w)
    seen = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(count)
    chain(x, w)
    sys.setprofile(None)
    return seen


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with fake_mesh(8) as mesh, torch.no_grad():
        x = distribute_tensor(torch.ones(16, 64), mesh, [Shard(0)], src_data_rank=None)
        w = distribute_tensor(torch.ones(64, 64), mesh, [Replicate()], src_data_rank=None)
        stock, enabled = [], []
        calls = {"stock": python_calls(x, w)}
        with dynamo_dist.enabled():
            calls["enabled"] = python_calls(x, w)
        for _ in range(TURNS):
            stock.append(microseconds(x, w))
            with dynamo_dist.enabled():
                enabled.append(microseconds(x, w))
    ratios = [b / a for a, b in zip(stock, enabled, strict=True)]
    result = {
        "torch": torch.__version__,
        "stock_us": round(statistics.median(stock), 1),
        "enabled_us": round(statistics.median(enabled), 1),
        "ratio": round(statistics.median(enabled) / statistics.median(stock), 4),
        "python_calls": calls,
        "ratio_of_turns": [round(r, 3) for r in sorted(ratios)],
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if options.json else f"{result['ratio']} times stock: {result}")


if __name__ == "__main__":
    main()
