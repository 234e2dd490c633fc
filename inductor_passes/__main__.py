"""``python -m inductor_passes COMMAND``: every command takes ``--json``."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

# Command -> the module that offers add_arguments(parser) and run(arguments), and its help.
COMMANDS = {
    "schedule": ("inductor_passes.cli.schedule", "order and bucket a schedule problem"),
    "verify-ranks": (
        "inductor_passes.cli.verify_ranks.command",
        "trace a script on fake ranks and show that all launch the same, in the same order",
    ),
    "costs": (
        "inductor_passes.cli.costs",
        "a step's time as a formula; measured times into a topology file",
    ),
    "kernels": ("inductor_passes.cli.kernels", "fused kernels, what they need, what runs here"),
}


def parser() -> argparse.ArgumentParser:
    """The command line, with every command's options."""
    made = argparse.ArgumentParser(prog="python -m inductor_passes")
    subparsers = made.add_subparsers(dest="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = importlib.import_module(module)
        command.add_arguments(subparsers.add_parser(name, help=summary, description=summary))
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. argparse exits with 2 on a bad command line."""
    arguments = parser().parse_args(argv)
    return int(importlib.import_module(COMMANDS[arguments.command][0]).run(arguments))


if __name__ == "__main__":
    sys.exit(main())
