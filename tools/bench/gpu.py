"""How fast are the fused kernels on this GPU, and how much of the communication do they hide?

usage: gpu.py [--json PATH] [--dry-run]

One GPU is enough: ranks are virtual, or peers are an emulated link, a kernel that really copies rows and
releases flags at 450, 150 and 50 GB/s. Runs ``test/gpu`` too. The JSON holds medians of 20 runs in microseconds
and the shares that the targets name; ``targets`` says which were met.

``--dry-run`` needs no GPU: it checks shapes with fake tensors, compiles every kernel for sm_90 through the gate,
and prints the times that the cost model predicts. Those are predictions, not measurements.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
# What the measurements should reach; see the functions below for what each compares.
TARGETS = {
    "all_gather_matmul, flags preset: share of cuBLAS": 0.92,
    "all_gather_matmul, throttled: fused over the longer of product and link, at most": 1.08,
    "all_gather_matmul, throttled: hidden share": 0.8,
    "all_reduce_add_rmsnorm: share of copy bandwidth": 0.85,
    "all_reduce_add_rmsnorm: speed-up over separate kernels": 1.15,
    "reduce_chunks: share of copy bandwidth": 0.82,
    "reduce_chunks: speed-up over torch.sum": 1.8,
}


def main() -> int:
    """Measure or predict; print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="write the results")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: compile and predict")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("there is no CUDA device: use --dry-run to compile and predict without one")
    content = dry_run() if arguments.dry_run else measure()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(content, indent=1) + "\n")
    return int(bool(content["problems"]))


def dry_run() -> dict[str, Any]:
    """Shapes, machine code and predictions."""
    import gpu_predict

    problems = gpu_predict.check_shapes() + gpu_predict.check_code()
    rows = gpu_predict.predict()
    table = Table(*rows[0], title="predicted, not measured (us)")
    for row in rows:
        table.add_row(*(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=160).print(table)
    for problem in problems:
        print(problem, file=sys.stderr)
    return {
        "kind": "predicted by the cost model, not measured",
        "triton": triton.__version__,
        "rows": rows,
        "problems": problems,
    }


def measure() -> dict[str, Any]:
    """Everything on this device, and the tests that need one."""
    import gpu_measure

    found = gpu_measure.measure_all()
    reached = targets(found)
    tests = subprocess.run([sys.executable, "-m", "pytest", "-q", ROOT / "test" / "gpu"], cwd=ROOT)
    table = Table("target", "wanted", "reached", "met", title=torch.cuda.get_device_name())
    for row in reached:
        table.add_row(row["target"], str(row["wanted"]), f"{row['reached']:.3f}", str(row["met"]))
    Console(width=160).print(table)
    return {
        "kind": "measured on one GPU; ranks virtual, link emulated",
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        **found,
        "targets": reached,
        "problems": ["test/gpu failed"] if tests.returncode else [],
    }


def targets(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The worst figure of each kind beside what it should be."""
    products = found["all_gather_matmul"]
    links = [link for product in products for link in product["links"]]
    norm, chunks = found["all_reduce_add_rmsnorm"], found["reduce_chunks"]
    worst = (
        min(product["share_of_cublas"] for product in products),
        max(link["fused_over_longer"] for link in links),
        min(link["hidden_share"] for link in links),
        norm["share_of_copy"],
        norm["speedup"],
        chunks["share_of_copy"],
        chunks["speedup"],
    )
    rows = []
    for (target, wanted), reached in zip(TARGETS.items(), worst, strict=True):
        met = reached <= wanted if target.endswith("at most") else reached >= wanted
        rows.append({"target": target, "wanted": wanted, "reached": reached, "met": met})
    return rows


if __name__ == "__main__":
    sys.exit(main())
