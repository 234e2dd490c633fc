"""Launches of a graph once its passes have run, written so that another graph of the program can do the same."""

from __future__ import annotations

import json
from dataclasses import dataclass

from inductor_passes.agree.stream import Stream
from inductor_passes.graph.collectives import launch_in_parts

PROGRAM = "program"  # a plan's text: the program's own launches in the program's order


@dataclass(frozen=True, slots=True)
class Planned:
    """One launch of the final graph: the program's launches that it stands for, by number, and what it does.

    A part of a launch has a text for its number (``graph/numbers.py``).
    """

    members: tuple[int | str, ...]
    what: str


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All launches of the final graph, in their order over all groups.

    One order over all groups, and not one for each: ranks that launch in one common order, and wait for a
    launch only behind it, cannot wait for one another in a circle.
    """

    launches: tuple[Planned, ...]

    @property
    def parts(self) -> dict[int, tuple[int, str]]:
        """Return into how many parts each of the program's launches is cut, and how they lie."""
        found = (launch_in_parts(member) for planned in self.launches for member in planned.members)
        return {launch: (count, along) for launch, count, along in filter(None, found)}

    @property
    def text(self) -> str:
        """One line; equal plans have equal texts."""
        return json.dumps([[list(p.members), p.what] for p in self.launches])

    def text_for(self, stream: Stream) -> str:
        """``PROGRAM`` if it is the order of ``stream``, else its text."""
        own = tuple(Planned((i,), launch.what) for i, launch in enumerate(stream.launches))
        return PROGRAM if self.launches == own else self.text

    @classmethod
    def of(cls, text: str) -> LaunchPlan:
        """Inverse of ``text``, which is not ``PROGRAM``. Raises ValueError for anything else."""
        try:
            return cls(
                tuple(
                    Planned(tuple(map(_number, members)), str(what))
                    for members, what in json.loads(text)
                )
            )
        except (TypeError, RecursionError) as error:
            raise ValueError(f"no launch plan: {error}") from error


def _number(member: object) -> int | str:
    if isinstance(member, str) and launch_in_parts(member) is not None:
        return member
    if isinstance(member, int):
        return int(member)
    raise ValueError(f"no launch plan: {member!r} is no number of a launch")
