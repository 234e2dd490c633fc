"""The output of ``explain`` and ``report``, printed and written: text or JSON, a page, a trace. Imports torch late."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_dist.diagnostics import MergedReport, RunReport


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """``--json``, ``--html FILE``, ``--trace FILE``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument(
        "--html", metavar="FILE", help="write the page, one file that works offline"
    )
    parser.add_argument("--trace", metavar="FILE", help="write the timelines for ui.perfetto.dev")


def fail(arguments: argparse.Namespace, why: str) -> None:
    """Say why there is no report: ``{"error": why}`` with ``--json``."""
    if arguments.json:
        print(json.dumps({"error": why}))
    else:
        print(f"error: {why}", file=sys.stderr)


def show(arguments: argparse.Namespace, merged: MergedReport, infix: str = "") -> None:
    """Files and text. ``infix`` tells the files of ranks apart that nobody brings together."""
    from dynamo_dist.diagnostics import render
    from dynamo_dist.diagnostics.render import trace

    report: RunReport | MergedReport = merged if merged.first.world_size > 1 else merged.first
    if arguments.json:
        print(json.dumps(merged.to_json(), indent=2))
    else:
        render(report)
    if arguments.html:
        _write(arguments.html, infix, render(report))
    if arguments.trace:
        _write(arguments.trace, infix, json.dumps(trace(merged)))


def _write(name: str, infix: str, text: str) -> None:
    path = Path(name)
    path = path.with_name(f"{path.stem}{infix}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        print(f"error: {path} was not written: {error.strerror}.", file=sys.stderr)
    else:
        print(f"wrote {path}", file=sys.stderr)
