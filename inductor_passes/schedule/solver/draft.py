"""Limits of what a list scheduler may use, and the draft that it gives back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from inductor_passes.schedule.solver.collect import Enough
from inductor_passes.schedule.solver.expand import Step


@dataclass(frozen=True, slots=True)
class Draft:
    """A schedule over tasks: its steps, when each task ends, its makespan (us) and peak (bytes).

    ``stalls``: per launch, how long the compute stream stood still for it. One that was given up has no end.
    """

    steps: list[Step]
    stalls: dict[int, float]
    finish: list[float]
    makespan_us: float
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Limits:
    """``cap_bytes``: of live memory. ``rises``: per task, to be left free for the program's order.

    ``scale_us``: the time that parts in ``Rules`` are parts of. ``enough``: the payloads for which launches
    wait for one another (``collect.py``). ``worth_us``: a draft that will end later than that is given up.
    ``tail``: per task, what must come after its end (us).
    """

    cap_bytes: int
    rises: list[int]
    scale_us: float
    enough: Enough
    worth_us: float = math.inf
    tail: Sequence[float] = ()
