"""``python -m dynamo_dist COMMAND``: every command takes ``--json``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from inductor_passes import cli

# Command -> its module, and its help.
COMMANDS = {
    "explain": (
        "dynamo_dist.cli.explain",
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
    return cli.parser_of("dynamo_dist", COMMANDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    return cli.run("dynamo_dist", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
