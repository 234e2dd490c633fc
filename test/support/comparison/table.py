"""What a run found, as a table for people and as figures."""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import torch
from comparison.outcome import BAD, VERDICTS, Verdict
from comparison.parts import PARTS
from rich.console import Console
from rich.table import Table


def figures(
    found: Mapping[str, Mapping[str, Verdict]], commit: str, seconds: float
) -> dict[str, Any]:
    """Counts by part, and by name what is lost, wrong or passed by neither."""
    parts = {}
    for part, verdicts in found.items():
        counts = collections.Counter(verdict.name for verdict in verdicts.values())
        named = {
            kind: {name: v.why for name, v in verdicts.items() if v.name == kind}
            for kind in (*BAD, "neither")
        }
        parts[part] = {
            "torch": torch.__version__,
            "commit": commit,
            "programs": len(verdicts),
            **{kind: counts[kind] for kind in VERDICTS},
            "names": {kind: names for kind, names in named.items() if names},
        }
    return {"seconds": seconds, "parts": parts}


def show(found: Mapping[str, Mapping[str, Verdict]], result: Mapping[str, Any]) -> None:
    """One row a part; below, what may not be."""
    table = Table(title=f"torch {torch.__version__}")
    table.add_column("part")
    table.add_column("programs", justify="right")
    for kind in VERDICTS:
        table.add_column(kind, justify="right", style="red" if kind in BAD else "")
    for part, row in result["parts"].items():
        table.add_row(PARTS[part].what, str(row["programs"]), *(str(row[k]) for k in VERDICTS))
    console = Console(width=110)
    console.print(table)
    for part, verdicts in found.items():
        for name, verdict in verdicts.items():
            if verdict.name in BAD:
                console.print(f"[red]{verdict.name}[/] {part}: {name}", highlight=False)
                console.print(f"    {verdict.why}", markup=False, highlight=False)
