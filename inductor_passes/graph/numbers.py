"""The program's numbers of launches, which stay with them through the passes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

# Of a launch: numbers of the program's launches that it stands for. New nodes inherit it (``rewrite/edit.py``).
MEMBERS = "dist_launches"


def numbers_of(members: Iterable[fx.Node]) -> tuple[int, ...]:
    """The numbers of several launches, for the one that takes their place."""
    return tuple(number for member in members for number in member.meta.get(MEMBERS, ()))
