"""A program of ranks that are unlike: its source, and what each rank does with it in each step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

WIDTH = 16  # of every activation
HOW = {
    "local": "gradients are not synchronized: a micro-batch before the last one",
    "eager": "the forward is not compiled",
    "autocast": "the forward runs under autocast",
    "outside": "the loss reads a weight too",
}


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor argument: this rank's own numbers, or with ``same`` those of all."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    same: bool = False


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the source that is compiled; ``train``: its outputs are summed and go
    backward.
    """

    name: str
    weights: tuple[Weight, ...] = ()
    train: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """What a rank does: ``call`` a function on a batch of ``rows``, or ``quiet``ly, without
    gradients; ``train`` the model, run its ``forward`` without gradients, ``update`` its
    parameters, put a ``hook`` on one of them; ``reset`` Dynamo. ``head``: which head of the model
    is used. ``how``: words of ``HOW``."""

    what: str
    name: str = ""
    rows: int = 0
    loud: bool = False
    head: int = 0
    how: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """All ranks of one program. ``events[rank][step]`` is what a rank does, in order.

    ``caches``: ``own`` folders or one ``shared``. ``warm``: None for one job; else the ranks whose
    caches are kept for a second job in the same processes. ``late``: a rank that compiles a second
    later than others. ``notes``: what was drawn, in words that outcomes are counted by.
    """

    seed: int
    mesh: tuple[int, ...]
    source: str
    functions: tuple[Function, ...]
    events: tuple[tuple[tuple[Event, ...], ...], ...]
    dynamic: tuple[bool | None, ...]
    caches: str
    warm: tuple[int, ...] | None
    late: int | None
    own_file: bool
    options: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.events)

    @property
    def tolerance(self) -> float:
        """Of numbers beside eager's. Those that went through a float32 sum are as good as that,
        whatever their dtype.
        """
        return 5e-2 if "autocast" in self.notes else 1e-4

    @property
    def may_not_follow(self) -> bool:
        """Whether a rank alone breaks its graphs after the job has run: it may say that it
        cannot follow.
        """
        if "break later" in self.notes:
            return True
        # Breaks in turns may all be in eager steps until the job runs in graphs.
        return any(self._breaks_later(rank) for rank in self.events)

    @staticmethod
    def _breaks_later(steps: tuple[tuple[Event, ...], ...]) -> bool:
        """Whether a rank trains compiled without a break before it first breaks a graph."""
        trained = [e for step in steps for e in step if e.what == "train" and "eager" not in e.how]
        breaks = [event.loud for event in trained]
        return any(breaks) and not breaks[0]
