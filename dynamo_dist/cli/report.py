"""``python -m dynamo_dist report PATH...``: reports on disk as one, the ranks merged.

PATH is a folder that ``options={"report": FOLDER}`` filled, a ``report.json`` in it, or what
``explain --json`` printed. ``--json`` prints the object that ``explain --json`` prints. The exit
status is 0, or 2 where there is no report to show.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dynamo_dist.cli import explain
from dynamo_dist.diagnostics import merge_ranks
from dynamo_dist.diagnostics.records import read_reports

if TYPE_CHECKING:
    from dynamo_dist.diagnostics import RunReport

_NOTHING = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``report``."""
    explain.add_output_arguments(parser)
    parser.add_argument("paths", nargs="+", metavar="PATH", type=Path, help="folders or JSON files")


def run(arguments: argparse.Namespace) -> int:
    """Show them; 0, or 2 if nothing can be read."""
    try:
        merged = merge_ranks([report for path in arguments.paths for report in _reports(path)])
    except (OSError, ValueError) as error:
        explain.fail(arguments, str(error))
        return _NOTHING
    explain.show(arguments, merged)
    return 0


def _reports(path: Path) -> Iterator[RunReport]:
    files = sorted(path.glob("report*.json")) if path.is_dir() else [path]
    if not files:
        raise ValueError(
            f'{path} holds no report*.json. options={{"report": {str(path)!r}}} writes them when '
            "a graph is first compiled."
        )
    for file in files:
        yield from read_reports(file)
