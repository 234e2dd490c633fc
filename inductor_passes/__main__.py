"""``python -m inductor_passes COMMAND``: every command takes ``--json``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from inductor_passes import cli

# Command -> its module, and its help.
COMMANDS = {
    "schedule": ("inductor_passes.cli.schedule", "order and bucket a schedule problem"),
    "costs": (
        "inductor_passes.cli.costs",
        "measured times into a topology file",
    ),
    "kernels": ("inductor_passes.fused.command", "fused kernels, what they need, what runs here"),
}


def parser() -> argparse.ArgumentParser:
    """The command line, with every command's options."""
    return cli.parser_of("inductor_passes", COMMANDS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    return cli.run("inductor_passes", COMMANDS, argv)


if __name__ == "__main__":
    sys.exit(main())
