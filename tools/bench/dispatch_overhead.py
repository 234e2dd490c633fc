"""What enabling costs eager's dispatch of DTensors that stock handles well: ratios, in one process.

    python tools/bench/dispatch_overhead.py [--json]

A chain of operators on DTensors of a fake group of 8 ranks, and what takes lists of 200 DTensors: steps of AdamW
and SGD with ``foreach=True``, AdamW with ``fused=True``, ``clip_grad_norm_``. Decisions are cached; stock and enabled
take turns, and the ratio is that of the fastest windows of either, in processor time: what else the machine does only
ever adds time. Ratios of neighbouring turns stand beside it, and so does the number of calls that Python makes, which
does not depend on the machine. Writes tools/bench/results/dispatch_overhead.json. Baseline: the same calls before
``enable()``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import dynamo_dist
from dynamo_dist.testing import fake_mesh

RESULT = Path(__file__).parent / "results" / "dispatch_overhead.json"
TURNS, CALLS = 15, 150
LIST_TURNS, LIST_WINDOWS, LIST_CALLS = 15, 12, 4


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


def python_calls(call: Callable[[], object]) -> int:
    """Functions that Python calls, its own and those in C, in one call, decisions cached."""
    for _ in range(20):
        call()
    seen = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal seen
        seen += event in ("call", "c_call")

    sys.setprofile(count)
    call()
    sys.setprofile(None)
    return seen


def python_calls_of_both(call: Callable[[], object]) -> dict[str, int]:
    """The same before ``enable()`` and after it."""
    stock = python_calls(call)
    with dynamo_dist.enabled():
        return {"stock": stock, "enabled": python_calls(call)}


def lists(mesh: DeviceMesh) -> dict[str, Callable[[], object]]:
    """Calls on 200 parameters of 16 x 16, sharded, with gradients."""

    def tensor() -> torch.Tensor:
        return distribute_tensor(torch.ones(16, 16), mesh, [Shard(0)], src_data_rank=None)

    parameters = [torch.nn.Parameter(tensor()) for _ in range(200)]
    for parameter in parameters:
        parameter.grad = tensor()
    return {
        "adamw_foreach": torch.optim.AdamW(parameters, lr=1e-9, foreach=True).step,
        "adamw_fused": torch.optim.AdamW(parameters, lr=1e-9, fused=True).step,
        "sgd_foreach": torch.optim.SGD(parameters, lr=1e-9, foreach=True).step,
        "clip_grad_norm_": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
    }


def of_turns(call: Callable[[], object]) -> dict[str, object]:
    """Stock beside enabled: milliseconds of a call, and the ratios of the turns."""

    def milliseconds() -> float:
        for _ in range(2):
            call()
        times = []
        for _ in range(LIST_WINDOWS):
            start = time.thread_time()
            for _ in range(LIST_CALLS):
                call()
            times.append(time.thread_time() - start)
        return min(times) / LIST_CALLS * 1e3  # what else runs only ever adds time

    stock, enabled = [], []
    for turn in range(LIST_TURNS):
        for is_enabled in (False, True) if turn % 2 else (True, False):
            if is_enabled:
                with dynamo_dist.enabled():
                    enabled.append(milliseconds())
            else:
                stock.append(milliseconds())
    ratios = sorted(b / a for a, b in zip(stock, enabled, strict=True))
    return {
        "stock_ms": round(statistics.median(stock), 3),
        "enabled_ms": round(statistics.median(enabled), 3),
        "ratio": round(min(enabled) / min(stock), 4),
        "python_calls": python_calls_of_both(call),
        "ratio_of_turns": [round(ratio, 3) for ratio in ratios],
    }


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
        calls = python_calls_of_both(lambda: chain(x, w))
        for _ in range(TURNS):
            stock.append(microseconds(x, w))
            with dynamo_dist.enabled():
                enabled.append(microseconds(x, w))
        with torch.enable_grad():
            of_lists = {name: of_turns(call) for name, call in lists(mesh).items()}
    ratios = [b / a for a, b in zip(stock, enabled, strict=True)]
    result = {
        "torch": torch.__version__,
        "stock_us": round(statistics.median(stock), 1),
        "enabled_us": round(statistics.median(enabled), 1),
        "ratio": round(min(enabled) / min(stock), 4),
        "python_calls": calls,
        "ratio_of_turns": [round(r, 3) for r in sorted(ratios)],
        "lists": of_lists,
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    said = {"chain": result["ratio"], **{name: of["ratio"] for name, of in of_lists.items()}}
    print(json.dumps(result) if options.json else f"times stock: {said}; {RESULT}")


if __name__ == "__main__":
    main()
