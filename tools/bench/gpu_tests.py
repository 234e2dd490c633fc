"""``test/gpu`` as parts of ``gpu.py``: what failed, what was skipped, and how it ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def all_but_two_processes() -> dict[str, Any]:
    """Run the tests that one process can run."""
    return run_tests("not two_processes")


def two_processes() -> dict[str, Any]:
    """Run the tests of two processes on one device."""
    return run_tests("two_processes")


def run_tests(chosen: str, more: Sequence[str] = ()) -> dict[str, Any]:
    """Run the tests that ``-k chosen`` selects; what they say goes to this process's output, as
    it comes.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v", "-rfEs"]
    lines = []
    with subprocess.Popen(
        [*command, *more, "-k", chosen, "test/gpu"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip("\n"))
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if process.returncode and not failed:
        failed = [f"pytest ended with {process.returncode}: {' '.join(lines)[-1000:]}"]
    skipped = [line for line in lines if line.startswith("SKIPPED")]
    found = {"summary": lines[-1] if lines else "", "skipped": skipped, "failed": failed}
    return found | ({"problem": "; ".join(failed)} if failed else {})
