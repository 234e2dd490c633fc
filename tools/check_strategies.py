"""Check DTensor's sharding strategies on torch's operator database, against one device.

    python tools/check_strategies.py --rules both --jobs 2           # all operators, resumes where it stopped
    python tools/check_strategies.py --rules ours --ops '^nn_functional_.*pool' --json

Each operator runs on samples of even and of uneven sizes, on meshes of 4 and of 2 x 2 ranks, in Shard,
Replicate and Partial placements, forward and backward, on all ranks in one process; those that average,
mask or count on samples too of which ranks count unequally much. Two calls of each are compiled. Exits
with 1 if an operator is silently wrong under our rules.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).parents[1] / "test" / "support"))

from comparison.strategies.samples import operators
from comparison.strategies.table import summary, update
from workers import run

RESULTS = Path(__file__).parent / "strategies" / "results"


def main(argv: list[str] | None = None) -> int:
    """Run the sweep; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rules", choices=("stock", "ours", "both"), default="ours")
    parser.add_argument(
        "--ops", default="", metavar="REGEX", help="operators by name; all by default"
    )
    parser.add_argument("--limit", type=int, default=4, help="samples of an operator of each kind")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one operator")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="folder of records, to resume"
    )
    parser.add_argument("--fresh", action="store_true", help="forget records of an earlier run")
    parser.add_argument("--table", type=Path, help="write the tables to this page; its text stays")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)

    names = [name for name in operators() if re.search(options.ops, name)]
    found = {
        rules: _sweep(names, rules, options)
        for rules in (("stock", "ours") if options.rules == "both" else (options.rules,))
    }
    if options.table:
        page = options.table.read_text() if options.table.exists() else ""
        options.table.write_text(update(page, found))
    if options.json:
        print(json.dumps({"torch": torch.__version__, "limit": options.limit, **found}))
    else:
        for rules, records in found.items():
            print(f"{rules}: {summary(records)}")
    wrong = [r for r in found.get("ours", ()) if r["verdict"].startswith(("wrong", "crash"))]
    for record in wrong:
        print(f"{record['name']}: {record['verdict']}: {record['examples']}", file=sys.stderr)
    return 1 if wrong else 0


def _sweep(names: list[str], rules: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of these operators, taken from an earlier run of the same kind where it has them."""
    version = torch.__version__.split("+")[0]
    path = options.results / f"{rules}_{version}_limit{options.limit}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        path.unlink(missing_ok=True)
    lines = path.read_text().splitlines() if path.exists() else []
    records = {record["name"]: record for record in map(json.loads, lines)}
    missing = [name for name in names if name not in records]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress,
        path.open("a") as out,
    ):
        task = progress.add_task(rules, total=len(names), completed=len(names) - len(missing))
        for name, record in run(
            missing,
            _operators_under,
            (rules, options.limit),
            options.jobs,
            options.timeout,
            lambda name: progress.update(task, description=f"{rules}: {name[:40]}"),
        ):
            if isinstance(record, str):
                record = {"name": name, "verdict": record, "counts": {}, "examples": {}}
            out.write(json.dumps(record) + "\n")
            out.flush()
            records[record["name"]] = record
            progress.advance(task)
    return [records[name] for name in names]


def _operators_under(rules: str, limit: int) -> Callable[[str], dict[str, Any]]:
    """What a process of the sweep does with an operator's name, under "stock" rules or "ours"."""
    from comparison.strategies.operator import sweep

    torch.set_num_threads(1)
    if rules == "ours":
        import dynamo_dist

        dynamo_dist.enable()
    known = operators()
    return lambda name: sweep(name, known[name], limit).record()


if __name__ == "__main__":
    sys.exit(main())
