"""Lists for readers: a heading each, never cut, and what is said of it indented below."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_INDENT = 4


def print_entries(console: Console, entries: Iterable[tuple[str, Iterable[str]]]) -> None:
    """Print headings with their lines. Headings stay on one line in any width; lines are wrapped."""
    from rich.padding import Padding
    from rich.text import Text

    for heading, lines in entries:
        console.print(Text(heading, "bold"), soft_wrap=True)
        for line in lines:
            console.print(Padding(Text(line), (0, 0, 0, _INDENT)))
