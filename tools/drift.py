#!/usr/bin/env python
"""Make the committed figures that no machine changes again, and fail where they have drifted.

    python tools/drift.py                  # all of them
    python tools/drift.py --quick          # those that take seconds: the part for CI
    python tools/drift.py --only plan --write

Modelled times, bytes, launches, gaps and counts follow from the code and torch's version alone. Where one
differs from its file in tools/bench/results/, either the change was meant, and the file is written anew with
--write, or something was lost. Seconds, dates and names of machines are left out. Exits with 1 on drift.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tools" / "bench" / "results"
# What a machine, a day or a version decides, by the last name on the way to a figure.
OF_THE_RUN = re.compile(r"(_s|seconds|^ms|date|machine|load_average|command|torch|triton)$")
MODELLED_MS = re.compile(r"(communication|model_\w+|step|program)_ms$")
RELATIVE = 1e-6


@dataclass(frozen=True, slots=True)
class Figures:
    """A committed result, and the command that makes it again; ``out`` is the option that names its file."""

    name: str
    command: tuple[str, ...]
    out: str = "--out"
    quick: bool = False

    @property
    def committed(self) -> Path:
        """The file in the repository."""
        return RESULTS / f"{self.name}.json"


ALL = (
    Figures("cost_model_error", ("tools/bench/cost_model_error.py",), quick=True),
    Figures("rewrite_bytes", ("tools/bench/rewrite_bytes.py",), quick=True),
    Figures("gpu_predicted", ("tools/bench/gpu.py", "--dry-run"), "--json"),
    Figures("plan", ("tools/bench/plan.py",)),
    Figures(
        "plan_32_layers",
        ("tools/bench/plan.py", "--layers", "32", "--mesh", "4x2", "--solve-only"),
    ),
    Figures("scaling", ("tools/bench/scaling.py",)),
    Figures("split", ("tools/bench/split.py",)),
)


@dataclass(frozen=True, slots=True)
class Drift:
    """A figure that is not what was committed."""

    where: str
    committed: object
    now: object


def main(argv: list[str] | None = None) -> int:
    """Make, compare, print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="results by name")
    parser.add_argument("--quick", action="store_true", help="those that take seconds")
    parser.add_argument("--write", action="store_true", help="commit to what is found")
    options = parser.parse_args(argv)

    chosen = [
        figures
        for figures in ALL
        if re.search(options.only, figures.name) and (figures.quick or not options.quick)
    ]
    table = Table("result", "figure", "committed", "now")
    drifted = 0
    for figures in chosen:
        start = time.monotonic()
        before = json.loads(figures.committed.read_text())
        made_with = str(before.get("torch", torch.__version__)).split("+")[0]
        if made_with != torch.__version__.split("+")[0]:
            print(f"{figures.name}: left out, made with torch {made_with}", file=sys.stderr)
            continue
        now = _made(figures)
        found = list(drifts(before, now))
        took = time.monotonic() - start
        print(f"{figures.name}: {len(found)} drifted, {took:.0f} s", file=sys.stderr)
        drifted += len(found)
        for drift in found:
            table.add_row(figures.name, drift.where, _short(drift.committed), _short(drift.now))
        if options.write:
            figures.committed.write_text(json.dumps(now, indent=1) + "\n")
    if drifted:
        Console().print(table)
    return 1 if drifted and not options.write else 0


def drifts(committed: Any, now: Any, where: str = "") -> Iterator[Drift]:
    """Where two results differ, but for what the run decides; numbers by more than a rounding."""
    name = where.rpartition(".")[2]
    if OF_THE_RUN.search(name) and not MODELLED_MS.search(name):
        return
    if isinstance(committed, dict) and isinstance(now, dict):
        for key in dict.fromkeys((*committed, *now)):
            yield from drifts(committed.get(key), now.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(committed, list) and isinstance(now, list) and len(committed) == len(now):
        for i, (a, b) in enumerate(zip(committed, now, strict=True)):
            yield from drifts(a, b, f"{where}[{i}]")
    elif not _same(committed, now):
        yield Drift(where, committed, now)


def _same(a: object, b: object) -> bool:
    if isinstance(a, (int, float)) and isinstance(b, (int, float)):
        return math.isclose(a, b, rel_tol=RELATIVE, abs_tol=1e-9)
    return a == b


def _made(figures: Figures) -> Any:
    script, *options = figures.command
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, str(ROOT / script), *options, figures.out, str(out)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if not out.exists():
            raise SystemExit(f"{' '.join(command)} failed:\n{ran.stderr[-2000:]}")
        # A result may name the command that made it: its file is the committed one.
        named = str(figures.committed.relative_to(ROOT))
        return json.loads(out.read_text().replace(str(out), named))


def _short(value: object) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


if __name__ == "__main__":
    sys.exit(main())
