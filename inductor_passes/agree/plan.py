"""Launches of a graph once its passes have run, written so that another graph of the program can do the same."""

from __future__ import annotations

import json
from dataclasses import dataclass

from inductor_passes.agree.stream import Stream

PROGRAM = "program"  # a plan's text: the program's own launches in the program's order


@dataclass(frozen=True, slots=True)
class Planned:
    """One launch of the final graph: the program's launches that it stands for, by number, and what it does."""

    members: tuple[int, ...]
    what: str


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All launches of the final graph, in their order over all groups.

    One order over all groups, and not one for each: ranks that launch in one common order, and wait for a
    launch only behind it, cannot wait for one another in a circle.
    """

    launches: tuple[Planned, ...]

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
                    Planned(tuple(int(member) for member in members), str(what))
                    for members, what in json.loads(text)
                )
            )
        except (TypeError, RecursionError) as error:
            raise ValueError(f"no launch plan: {error}") from error
