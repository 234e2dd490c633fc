"""``python -m dynamo_dist COMMAND``: every command takes ``--json``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Command -> the module that offers add_arguments(parser) and run(arguments), and its help.
COMMANDS = {
    "explain": (
        "dynamo_dist.cli.explain.command",
        "run a script as it is, and report its graph breaks, recompiles and collectives",
    ),
    "report": (
        "dynamo_dist.cli.report",
        "show reports that are on disk, ranks merged",
    ),
    "doctor": ("dynamo_dist.cli.doctor", "versions, what is on, what is degraded and why"),
}


def parser() -> argparse.ArgumentParser:
    """The command line, with every command's options."""
    made = argparse.ArgumentParser(prog="python -m dynamo_dist")
    subparsers = made.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = importlib.import_module(module)
        command.add_arguments(subparsers.add_parser(name, help=summary, description=summary))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. argparse exits with 2 on a bad command line."""
    arguments = parser().parse_args(argv)
    run = importlib.import_module(COMMANDS[arguments.command][0]).run
    return int(run(arguments))


if __name__ == "__main__":
    sys.exit(main())
