"""How fast are the fused kernels on this GPU, and how much of the communication do they hide?

usage: gpu.py [--parts a,b,c] [--json PATH] [--skip-done] [--seconds N] | --dry-run [--json PATH]

One GPU is enough: ranks are virtual, or peers are an emulated link, a kernel that really copies
rows and releases flags at 450, 150 and 50 GB/s. Each part is a process of its own with a limit of
100 s, in order of worth; all end within nine minutes. Nothing need be installed. The JSON is
written after each part and names the GPU, its driver and the date; what a part found is under
``parts``, and ``targets`` says which were met. ``--skip-done`` goes on from it: parts without a
problem are not run again. The exit status is 1 if something failed or came out wrong.

``--dry-run`` needs no GPU: it checks shapes with fake tensors, compiles every kernel for sm_90
through the gate, goes through the parts that launch kernels with Triton's launcher and a stand-in
for the device, and prints the times that the cost model predicts. Those are predictions, not
measurements.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gpu_parts
import torch
import triton
from rich.console import Console
from rich.table import Table

SECONDS = 540.0
LEAST_S = 5.0  # a part is not begun for less


def main(argv: Sequence[str] | None = None) -> int:
    """Measure or predict; print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(gpu_parts.PARTS), help="default: all, in order")
    parser.add_argument("--json", metavar="PATH", help="write the results")
    parser.add_argument("--skip-done", action="store_true", help="keep the JSON's good parts")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: compile and predict")
    parser.add_argument("--part", choices=gpu_parts.PARTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.part:
        return child(arguments.part, dry=arguments.dry_run)
    if arguments.dry_run:
        return dry_run(arguments.json)
    names = [name for name in arguments.parts.split(",") if name]
    if unknown := set(names) - set(gpu_parts.PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; {', '.join(gpu_parts.PARTS)}")
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device: use --dry-run to compile and predict without one")
    path = Path(arguments.json) if arguments.json else None
    content = {"kind": "measured on one GPU; ranks virtual, link emulated", **environment()}
    content["parts"] = done_in(path) if arguments.skip_done else {}
    run_parts(names, content, path, arguments.seconds)
    show(content)
    return int(any("problem" in part for part in content["parts"].values()))


def child(name: str, *, dry: bool) -> int:
    """One part in this process: its result as the marked line."""
    if dry:
        import gpu_dry

        found = gpu_dry.gone_through(name)
    else:
        found = gpu_parts.measured_here(gpu_parts.PARTS[name])
    gpu_parts.print_result(found)
    return 0


def run_parts(
    names: Sequence[str],
    content: dict[str, Any],
    path: Path | None,
    seconds: float,
    command: Callable[[str], list[str]] = gpu_parts.part_command,
    limit_s: float = gpu_parts.LIMIT_S,
) -> None:
    """Run the parts that ``content`` lacks, one after another, and write ``content`` after each."""
    end = time.monotonic() + seconds
    for name in names:
        if name in content["parts"]:
            continue
        left = min(limit_s, end - time.monotonic())
        if left < min(LEAST_S, limit_s):
            content["parts"][name] = {"problem": "no time was left for it"}
        else:
            content["parts"][name] = gpu_parts.run_part(command(name), left)
        found = content["parts"][name]
        print(f"{name}: {found.get('seconds', 0)} s, {found.get('problem', 'well')}", flush=True)
        content["targets"] = targets(content["parts"])
        write(path, content)


def done_in(path: Path | None) -> dict[str, Any]:
    """The parts of an earlier run that ended well."""
    if path is None or not path.exists():
        return {}
    parts = json.loads(path.read_text()).get("parts", {})
    return {name: part for name, part in parts.items() if "problem" not in part}


def write(path: Path | None, content: dict[str, Any]) -> None:
    """Write all or nothing: a run that is ended while it writes leaves what was there."""
    if path is None:
        return
    fresh = path.with_name(path.name + ".new")
    fresh.write_text(json.dumps(content, indent=1) + "\n")
    fresh.replace(path)


def show(content: dict[str, Any]) -> None:
    """One table: targets, then parts; then what went wrong, whole."""
    console = Console(width=160)
    table = Table("target or part", "wanted", "reached", "met", title=content["device"])
    for row in content.get("targets", ()):
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    for name, part in content["parts"].items():
        ended = "no" if "problem" in part else "yes"
        table.add_row(f"part {name}", "no problem", f"{part.get('seconds', 0)} s", ended)
    console.print(table)
    for name, part in content["parts"].items():
        if "problem" in part:
            print(f"{name}: {part['problem']}\n{part.get('said', '')}", file=sys.stderr)


def dry_run(path: str | None) -> int:
    """Shapes, machine code, launches and predictions."""
    import gpu_dry
    import gpu_predict

    problems = gpu_predict.check_shapes() + gpu_predict.check_code()
    for name in gpu_dry.DRY:
        found = gpu_parts.run_part(gpu_parts.part_command(name, dry=True))
        print(f"{name}: {found['seconds']} s, {found.get('launches', 0)} launches", flush=True)
        if "problem" in found:
            problems.append(f"{name}: {found['problem']} {found.get('said', '')}")
    rows = gpu_predict.predict()
    table = Table(*rows[0], title="predicted, not measured (us)")
    for row in rows:
        table.add_row(*(f"{v:.1f}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=160).print(table)
    content = {
        "kind": "predicted by the cost model, not measured",
        "triton": triton.__version__,
        "rows": rows,
        "problems": problems,
    }
    write(Path(path) if path else None, content)
    for problem in problems:
        print(problem, file=sys.stderr)
    return int(bool(problems))


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
        "processors": os.cpu_count(),
    }


def cases(parts: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The cases of a part: none where it did not run."""
    return [case for case in parts.get(name, {}).values() if isinstance(case, dict)]


def targets(parts: dict[str, Any]) -> list[dict[str, Any]]:
    """What was wanted, and the worst figure of each kind; of links, those that the pass would
    fuse for.
    """
    products, norms = cases(parts, "products"), cases(parts, "norms")
    large = [norm for norm in norms if norm["two_shot"]]
    links = [link for product in products for link in product["links"] if link["taken"]]
    variants = [case["share_of_cublas"] for case in cases(parts, "variants")]
    gathers = [case for case in variants if "descriptors with copies" in case]
    scatters = [case for case in variants if "sum of parts" in case]
    steps = [
        row
        for row in parts.get("schedule", {}).get("rows", ())
        if row["variant"] == "ours" and row["copies"] == "engine"
    ]
    wanted = (
        ("gather, flags preset: share of cuBLAS", ">=", 0.95, gathers, "descriptors"),
        ("gather, with copies: share of cuBLAS", ">=", 0.9, gathers, "descriptors with copies"),
        ("scatter: share of cuBLAS", ">=", 0.95, scatters, "descriptors"),
        ("schedule: step over the longer of compute and link", "<=", 1.05, steps, "over_longer"),
        ("schedule: share of the link hidden", ">=", 0.9, steps, "hidden_share"),
        (
            "products, throttled: fused over the longer of its product and the link",
            "<=",
            1.08,
            links,
            "fused_over_longer",
        ),
        ("products, throttled: hidden share", ">=", 0.8, links, "hidden_share"),
        ("norms, two-shot: share of copy bandwidth", ">=", 0.9, large, "share_of_copy"),
        ("norms: speed-up over separate kernels", ">=", 1.15, norms, "speedup"),
        (
            "norms: 1,000 replays of a CUDA graph keep every bit",
            ">=",
            1,
            norms,
            "replays_keep_bits",
        ),
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
