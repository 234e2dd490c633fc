"""The command: run the script, gather what its processes saw, print one report.

``--json`` prints one object and nothing else: ``{schema, world_size, missing, differences, reports}``, as
``dynamo_dist.diagnostics.records`` describes it, or ``{"error": why}`` where there is no report; what the script
prints goes to standard error then. The exit status is the script's own.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo_dist.cli.explain import child, output, process

# How long rank 0 waits for the reports of other ranks once its own script has ended.
WAIT_S = 30.0
_REFUSED = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of ``explain``."""
    output.add_arguments(parser)
    parser.add_argument(
        "--backend",
        default="",
        metavar="NAME",
        help="compile with this backend (dynamo_dist) where the script names none; "
        "left out, the script runs as it is",
    )
    parser.add_argument("--schema", action=_PrintSchema, help="print the JSON schema of --json")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module")
    parser.add_argument("script", help="a Python file that calls torch.compile")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets")


class _PrintSchema(argparse.Action):
    """Like ``--help``: prints and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, **how: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **how)

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        from dynamo_dist.diagnostics.records import json_schema

        print(json.dumps(json_schema(), indent=2))
        parser.exit()


def run(arguments: argparse.Namespace) -> int:
    """Run the script and report; the script's exit status, or 2 if it cannot be started."""
    if why := _refusal(arguments):
        output.fail(arguments, why)
        return _REFUSED
    with tempfile.TemporaryDirectory(prefix="dynamo_dist_explain_") as folder:
        script = ["-m", arguments.script] if arguments.is_module else [arguments.script]
        environ = {**os.environ, child.FOLDER: folder, child.BACKEND: arguments.backend}
        command = [*process.interpreter(), *script, *arguments.arguments]
        with process.running(command, environ, quiet=arguments.json) as wait:
            status = wait()
            try:
                _report(arguments, folder, status)
            except Exception as error:  # the script's status counts, whatever becomes of its report
                output.fail(arguments, f"there is no report: {type(error).__name__}: {error}")
    return process.end_like(status)


def _refusal(arguments: argparse.Namespace) -> str:
    if not arguments.is_module and not Path(arguments.script).is_file():
        return f"There is no script {arguments.script!r}."
    installed = importlib.metadata.entry_points(group="torch.backends", name="dynamo_dist")
    if not installed:
        return (
            "dynamo-dist is not installed, so that torch does not call it in the script's processes. "
            "Install it: pip install -e . in a checkout."
        )
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return (
            "TORCH_DEVICE_BACKEND_AUTOLOAD is off, so that torch calls no extension in the script's "
            "processes. Unset it."
        )
    return ""


def _report(arguments: argparse.Namespace, folder: str, status: int) -> None:
    """Show the report of all ranks that are known here; other ranks than 0 hand theirs to rank 0."""
    from dynamo_dist.cli.explain import journal, ranks
    from dynamo_dist.diagnostics import Fact, RunReport, merge_ranks

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    found = journal.read(folder, (rank, world_size)) or [RunReport(rank, world_size)]
    ended = Fact("exit status", _status_text(status), "", "the script's")
    found = [dataclasses.replace(report, facts=(ended, *report.facts)) for report in found]
    others = sorted(set(range(found[0].world_size)) - {report.rank for report in found})
    is_host = found[0].rank == 0
    store = ranks.agent_store() if world_size > 1 else None
    if store is None and others:
        # A script that ended before it met anyone leaves what the launcher said.
        given = ranks.given_address() if world_size > 1 else ""
        if address := journal.meeting(folder) or given:
            store = ranks.own_store(address, is_host, WAIT_S)
    if store is not None and not is_host:
        for report in found:
            ranks.give(store, report)
        return
    if store is not None:
        found += ranks.take(store, others, WAIT_S)
    output.show(arguments, merge_ranks(found), "" if is_host else f".rank{found[0].rank}")


def _status_text(status: int) -> str:
    return str(status) if status >= 0 else f"killed by {signal.Signals(-status).name}"
