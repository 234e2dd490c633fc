"""``python -m inductor_passes costs show``: measured times beside those that the topology predicts, worst first.

``--json`` prints ``{"tables": [{"file", "machine", "torch", "world", "steps", "compute_stretch", "launch_stretch",
"compute_factor", "launch_factor", "rows": [{"graph", "phase", "what", "name", "us", "predicted_us"}], "outcome": {"before_us", "after_us",
"recompile_s", "changes"}}]}``: a factor is how many
times as long everything of that sort took as predicted, together; null where nothing was predicted. ``outcome``: of a step before and after, and what is otherwise in the schedule of the
rank that wrote the file; null where the job left none.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from inductor_passes.attach.measured import folder
from inductor_passes.errors import PassesError
from inductor_passes.files import text_of
from inductor_passes.machine.times.file import FORM, of_text, outcome_of
from inductor_passes.machine.times.times import Times, TunedStep

_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line."""
    parser.add_argument(
        "files", nargs="*", metavar="FILE", help="tables; default: all beside the compile cache"
    )
    parser.add_argument("--rows", type=int, default=_SHOWN, help="rows of each table; 0: all")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Read and print; 0, or 2 after a one-line error."""
    files = arguments.files or sorted(map(str, Path(folder()).glob("*.json")))
    try:
        texts = {file: text_of(file, FORM) for file in files}
        tables = [_table(file, of_text(t, file), outcome_of(t, file)) for file, t in texts.items()]
    except PassesError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json:
        print(json.dumps({"tables": tables}))
    else:
        print("\n\n".join(_text(table, arguments.rows) for table in tables) or _none())
    return 0


def _table(file: str, times: Times, outcome: TunedStep | None) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for graph, timed in times.graphs.items():
        of = {"graph": graph, "phase": timed.phase}
        for what, found in (("compute", timed.nodes), ("launch", timed.launches)):
            for name, each in found.items():
                took = {"us": each.us, "predicted_us": each.predicted_us}
                rows.append({**of, "what": what, "name": name, **took})
    rows.sort(key=lambda row: -abs(row["us"] - row["predicted_us"]))
    return {
        "file": file,
        "machine": times.machine,
        "torch": times.torch,
        "world": times.world,
        "steps": times.steps,
        "compute_stretch": times.compute_stretch,
        "launch_stretch": times.launch_stretch,
        "compute_factor": _factor(rows, "compute"),
        "launch_factor": _factor(rows, "launch"),
        "rows": rows,
        "outcome": None if outcome is None else dataclasses.asdict(outcome),
    }


def _factor(rows: Sequence[dict[str, Any]], what: str) -> float | None:
    took = sum(row["us"] for row in rows if row["what"] == what)
    said = sum(row["predicted_us"] for row in rows if row["what"] == what)
    return took / said if said else None


def _text(table: dict[str, Any], most: int) -> str:
    lines = [
        table["file"],
        f"measured on {table['machine']}, torch {table['torch']}, {table['world']} ranks, {table['steps']} steps",
    ]
    for what, said in (("compute", "compute takes"), ("launch", "launches take")):
        if (factor := table[f"{what}_factor"]) is not None:
            lines.append(f"{said} {factor:.2f} times what the topology says")
    lines.append(
        f"beside a collective compute takes {table['compute_stretch']:.2f} times as long, and a collective beside "
        f"compute {table['launch_stretch']:.2f} times"
    )
    if (outcome := table["outcome"]) is not None:
        lines.append(
            f"a step took {outcome['before_us'] / 1e3:.2f} ms, and {outcome['after_us'] / 1e3:.2f} ms by these costs; "
            f"compiling again took {outcome['recompile_s']:.1f} s"
        )
        lines += [f"changed in the schedule, {change}" for change in outcome["changes"]]
    rows = table["rows"][: most or None]
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        lines.append(
            f"  {row['phase']:9} {row['what']:7} {row['name']:{width}}  measured {row['us']:10.1f} us  "
            f"predicted {row['predicted_us']:10.1f} us"
        )
    if left := len(table["rows"]) - len(rows):
        lines.append(f"  and {left} more (--rows 0)")
    return "\n".join(lines)


def _none() -> str:
    return f"No measured times in {folder()}: dynamo_dist.tune(step) writes them."
