"""The program's numbers of launches, which stay with them through the passes."""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import fx

# Of a launch: numbers of the program's launches that it stands for. New nodes inherit it (``rewrite/edit.py``).
MEMBERS = "dist_launches"
# Of a launch: what became of the joint graph (``split/joint.py``).
JOINT = "dist_joint"
_PART = re.compile(
    r"(?P<launch>[0-9]{1,9}): part [0-9]{1,9} of (?P<parts>[0-9]{1,9}) along (?P<along>.+)"
)


def numbers_of(members: Iterable[fx.Node]) -> tuple[int | str, ...]:
    """The numbers of several launches, for the one that takes their place."""
    return tuple(number for member in members for number in member.meta.get(MEMBERS, ()))


def part_of(launch: fx.Node, part: int, parts: int, along: str) -> tuple[str, ...]:
    """The number of one part of a launch, with all that ranks must cut alike; none if the launch has no number."""
    numbers = launch.meta.get(MEMBERS, ())
    return tuple(f"{number}: part {part + 1} of {parts} along {along}" for number in numbers)


def launch_in_parts(number: int | str) -> tuple[int, int, str] | None:
    """The program's number, the count of parts and how they lie, of a part's number; None for a whole launch's."""
    found = _PART.fullmatch(number) if isinstance(number, str) else None
    return (int(found["launch"]), int(found["parts"]), found["along"]) if found else None
