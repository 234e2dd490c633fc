"""``python -m inductor_passes COMMAND``: every command takes ``--json``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from inductor_passes import cli, registry

# Command -> its module, and its help.
COMMANDS = {
    "schedule": ("inductor_passes.cli.schedule", "order and bucket a schedule problem"),
    "costs": (
        "inductor_passes.cli.costs",
        "measured times into a topology file",
    ),
}


def commands() -> dict[str, tuple[str, str]]:
    """Commands of this package and of extensions."""
    return COMMANDS | {name: c for e in registry.extensions() for name, c in e.commands.items()}


def parser() -> argparse.ArgumentParser:
    """The command line, with every command's options."""
    return cli.parser_of("inductor_passes", commands())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    return cli.run("inductor_passes", commands(), argv)


if __name__ == "__main__":
    sys.exit(main())
