"""Commands of ``python -m inductor_passes``: each a module with add_arguments(parser) and
run(arguments).
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_INDENT = 4

# Command -> its module, and its help.
Commands = Mapping[str, tuple[str, str]]


def parser_of(package: str, commands: Commands) -> argparse.ArgumentParser:
    """The command line of a package, with every command's options."""
    made = argparse.ArgumentParser(prog=f"python -m {package}")
    subparsers = made.add_subparsers(dest="command", required=True)
    for name, (module, summary) in commands.items():
        command = importlib.import_module(module)
        command.add_arguments(subparsers.add_parser(name, help=summary, description=summary))
    return made


def run(package: str, commands: Commands, argv: Sequence[str] | None) -> int:
    """Run one command; its exit status. argparse exits with 2 on a bad command line."""
    arguments = parser_of(package, commands).parse_args(argv)
    return int(importlib.import_module(commands[arguments.command][0]).run(arguments))


def print_entries(console: Console, entries: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Print headings with their lines. Headings stay on one line in any width; lines are
    wrapped.
    """
    # Slow to import, and ``--json`` prints without it.
    from rich.padding import Padding
    from rich.text import Text

    for heading, lines in entries:
        console.print(Text(heading, "bold"), soft_wrap=True)
        for line in lines:
            console.print(Padding(Text(line), (0, 0, 0, _INDENT)))
