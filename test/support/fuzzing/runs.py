"""A file of fuzzing runs: each run by what tells it apart, and the sums of all."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Run = dict[str, Any]


def commit() -> str:
    """The short hash of what is checked out, empty outside a clone."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def add(
    run: Run,
    path: Path,
    key: Callable[[Run], tuple[Any, ...]],
    summed: Iterable[str],
    **more: Callable[[list[Run]], Any],
) -> None:
    """Put a run into the file in place of one of the same key; sum up ``summed``, and make
    ``more`` of all runs.
    """
    record = json.loads(path.read_text()) if path.exists() else {"runs": []}
    others = [each for each in record["runs"] if key(each) != key(run)]
    runs = sorted([*others, run], key=lambda each: (int(each["seed"]), each["commit"]))
    totals = {name: round(sum(each[name] for each in runs), 1) for name in summed}
    made = {name: of(runs) for name, of in more.items()}
    path.write_text(json.dumps({**record, **totals, **made, "runs": runs}, indent=1) + "\n")
