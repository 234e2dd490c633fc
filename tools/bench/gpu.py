"""How fast are the fused kernels on this GPU, and how much of the communication do they hide?

usage: gpu.py [--json PATH] [--dry-run]

One GPU is enough: ranks are virtual, or peers are an emulated link, a kernel that really copies rows and
releases flags at 450, 150 and 50 GB/s. Runs ``test/gpu`` too, which needs the package installed (``pip install
--no-deps --no-build-isolation -e .`` where no registry can be reached). The JSON names the GPU, its driver and
the date; it holds medians of 20 runs in microseconds and the shares that the targets name; ``targets`` says which
were met. It is written after each part. The exit status is 1 if something failed or came out wrong.

``--dry-run`` needs no GPU: it checks shapes with fake tensors, compiles every kernel for sm_90 through the gate,
and prints the times that the cost model predicts. Those are predictions, not measurements.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 2e-2  # one rounding to bfloat16, and of what is added
TEST_SECONDS = 400


def main() -> int:
    """Measure or predict; print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="PATH", help="write the results")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: compile and predict")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        parser.error("there is no CUDA device: use --dry-run to compile and predict without one")
    content: dict[str, Any] = {}
    for content in dry_run() if arguments.dry_run else measure():
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(content, indent=1) + "\n")
    for problem in content["problems"]:
        print(problem, file=sys.stderr)
    return int(bool(content["problems"]))


def dry_run() -> Iterator[dict[str, Any]]:
    """Shapes, machine code and predictions."""
    import gpu_predict

    problems = gpu_predict.check_shapes() + gpu_predict.check_code()
    rows = gpu_predict.predict()
    table = Table(*rows[0], title="predicted, not measured (us)")
    for row in rows:
        table.add_row(*(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=160).print(table)
    yield {
        "kind": "predicted by the cost model, not measured",
        "triton": triton.__version__,
        "rows": rows,
        "problems": problems,
    }


def measure() -> Iterator[dict[str, Any]]:
    """Everything on this device, and the tests that need one: the results so far, after each part."""
    import gpu_products
    import gpu_streams
    import gpu_timing

    content: dict[str, Any] = {"kind": "measured on one GPU; ranks virtual, link emulated"}
    content |= environment() | {"problems": []}

    def part(name: str, fn: Callable[[], Any]) -> Any:
        start = time.monotonic()
        try:
            content[name] = fn()
        except Exception as error:
            content["problems"].append(f"{name}: {type(error).__name__}: {error}")
            traceback.print_exc()
        print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)

    part("copy_gb_per_s", gpu_timing.copy_gb_per_s)
    rate = content.get("copy_gb_per_s", float("nan"))
    for two_shot in (True, False):
        name = f"all_reduce_add_rmsnorm, {'two' if two_shot else 'one'}-shot"
        part(name, lambda shots=two_shot: gpu_streams.measure_norm(rate, two_shot=shots))
        yield content
    for m, n, k in gpu_products.PRODUCTS:
        part(
            f"all_gather_matmul, {m} x {n} x {k}",
            lambda shape=(m, n, k): gpu_products.measure_all_gather_matmul(*shape),
        )
        yield content
    content["problems"] += wrong_numbers(content)
    content["targets"] = targets(content)
    table = Table("target", "wanted", "reached", "met", title=content["device"])
    for row in content["targets"]:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=160).print(table)
    yield content
    part("tests", run_tests)
    content["problems"] += content.get("tests", {}).get("failed", [])
    yield content


def environment() -> dict[str, Any]:
    """What was measured on, with what, and when."""
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
        version = driver.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        version = "unknown"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "multiprocessors": properties.multi_processor_count,
        "driver": version,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def run_tests() -> dict[str, Any]:
    """``test/gpu`` in a process of its own: how it ended, and what failed."""
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test/gpu"]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=TEST_SECONDS,
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        return {
            "summary": text[-2000:],
            "failed": [f"test/gpu did not end within {TEST_SECONDS} s"],
        }
    print(done.stdout[-6000:])
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if done.returncode and not failed:
        failed = [f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-1000:]}"]
    skipped = [line for line in lines if line.startswith("SKIPPED")]
    return {"summary": lines[-1] if lines else "", "skipped": skipped, "failed": failed}


def _found(content: dict[str, Any], kernel: str) -> list[dict[str, Any]]:
    return [value for name, value in content.items() if name.startswith(kernel)]


def wrong_numbers(content: dict[str, Any]) -> list[str]:
    """Every part whose largest error is too large, or whose replays changed a bit."""
    problems = []
    for name, found in content.items():
        if not isinstance(found, dict) or name == "tests":
            continue
        for row in (found, *found.get("links", ())):
            error = row.get("largest_error", 0.0)
            if not error <= TOLERANCE:
                problems.append(f"{name}: the largest error is {error} of {TOLERANCE}")
        if not found.get("replays_keep_bits", True):
            problems.append(f"{name}: replays of a CUDA graph changed bits")
    return problems


def targets(content: dict[str, Any]) -> list[dict[str, Any]]:
    """What was wanted, and the worst figure of each kind; of links, those that the pass would fuse for."""
    products = _found(content, "all_gather_matmul")
    norms = _found(content, "all_reduce_add_rmsnorm")
    links = [link for product in products for link in product["links"] if link["taken"]]
    wanted = (
        (
            "all_gather_matmul, flags preset: share of cuBLAS",
            ">=",
            0.92,
            products,
            "share_of_cublas",
        ),
        (
            "all_gather_matmul, throttled: fused over the longer of its product and the link",
            "<=",
            1.08,
            links,
            "fused_over_longer",
        ),
        ("all_gather_matmul, throttled: hidden share", ">=", 0.8, links, "hidden_share"),
        ("all_reduce_add_rmsnorm: share of copy bandwidth", ">=", 0.85, norms, "share_of_copy"),
        (
            "all_reduce_add_rmsnorm: speed-up over separate kernels",
            ">=",
            1.15,
            norms,
            "speedup",
        ),
        ("1,000 replays of a CUDA graph keep every bit", ">=", 1, norms, "replays_keep_bits"),
    )
    rows = []
    for target, relation, bound, found, field in wanted:
        figures = [row[field] for row in found]
        reached = (max if relation == "<=" else min)(figures) if figures else None
        met = bool(figures) and (reached <= bound if relation == "<=" else reached >= bound)
        rows.append(
            {"target": target, "wanted": f"{relation} {bound}", "reached": reached, "met": met}
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
