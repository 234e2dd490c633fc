"""Steps that took much longer than the others, and who was the cause."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outlier:
    """A step that took ``factor`` times the median. ``rank``: whose compute it was; None: no rank computed longer."""

    step: int
    factor: float
    rank: int | None


def outliers(
    took: Mapping[int, Sequence[float]], computed: Mapping[int, Sequence[float]], least: float = 1.5
) -> tuple[Outlier, ...]:
    """Find steps in which the slowest rank took at least ``least`` times its median.

    ``took``, ``computed``: of each rank and step, the whole and the compute in it, in any one unit.
    """
    count = min(map(len, (*took.values(), *computed.values())), default=0)
    if count < 3:  # no median tells one of two from the other
        return ()
    slowest = [max(each[step] for each in took.values()) for step in range(count)]
    usual = statistics.median(slowest)
    usually = {rank: statistics.median(each[:count]) for rank, each in computed.items()}
    found = []
    for step, us in enumerate(slowest):
        if usual <= 0 or us < least * usual:
            continue
        longer = {rank: each[step] - usually[rank] for rank, each in computed.items()}
        rank = max(longer, key=lambda r: longer[r])
        # Half of what the step took longer is that rank's compute, or more.
        found.append(Outlier(step, us / usual, rank if longer[rank] >= (us - usual) / 2 else None))
    return tuple(found)
