"""Links that several channels share: launches on their way at once share the rate, and only their start-ups overlap.

On each channel launches run first in, first out. A launch starts up, which takes no part of the link, and then moves its bytes,
at an equal share of the link's rate beside others that do so. Times are microseconds; a launch alone takes its start-up
and its transfer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Launch:
    entry: int
    startup_us: float
    transfer_us: float  # what is left, of the link alone


@dataclass(slots=True)
class SharedLink:
    """One link and the channels on it. Launches are given in the order of time; ``start``, ``end``: by entry, as far as known."""

    start: dict[int, float] = field(default_factory=dict)
    end: dict[int, float] = field(default_factory=dict)
    _now: float = 0.0
    _queues: dict[str, list[_Launch]] = field(default_factory=dict)

    def launch(
        self, entry: int, channel: str, at: float, startup_us: float, transfer_us: float
    ) -> None:
        """Queue a launch behind those of its channel, at a time no earlier than that of the launch before."""
        self._advance(at)
        self._queues.setdefault(channel, []).append(_Launch(entry, startup_us, transfer_us))

    def end_of(self, entry: int) -> float:
        """Return when a launch has finished, if none is added before that."""
        while entry not in self.end:
            self._step(math.inf)
        return self.end[entry]

    def drain(self) -> float:
        """Run all that was launched to its end; return the time."""
        self._advance(math.inf)
        return max(self.end.values(), default=0.0)

    def idle_at(self) -> float:
        """Return when all that was launched so far has finished, if nothing is added; nothing changes."""
        queues = {
            c: [_Launch(x.entry, x.startup_us, x.transfer_us) for x in q]
            for c, q in self._queues.items()
        }
        return SharedLink(dict(self.start), dict(self.end), self._now, queues).drain()

    def _advance(self, to: float) -> None:
        while self._now < to and any(self._queues.values()):
            self._step(to)
        if to < math.inf:
            self._now = max(self._now, to)

    def _step(self, to: float) -> None:
        """Run to the next end of a start-up or a transfer, or to a time."""
        heads = [(queue, queue[0]) for queue in self._queues.values() if queue]
        for _, head in heads:
            self.start.setdefault(head.entry, self._now)
        moving = [head for _, head in heads if head.startup_us <= 0.0]
        takes = [h.startup_us for _, h in heads if h.startup_us > 0.0]
        takes += [h.transfer_us * len(moving) for h in moving]
        step = min(min(takes), to - self._now)
        for _, head in heads:
            if head.startup_us > 0.0:
                head.startup_us -= step
                if head.startup_us <= _NOTHING_US:
                    head.startup_us = 0.0
            else:
                head.transfer_us -= step / len(moving)
        self._now += step
        for queue, head in heads:
            if head.startup_us <= 0.0 and head.transfer_us <= _NOTHING_US:
                self.end[head.entry] = self._now
                queue.pop(0)


_NOTHING_US = 1e-9  # of rounding


def startup_us(points: Sequence[tuple[float, float]], amount: float, us: float) -> float:
    """Return the start-up in the time ``us`` of a launch of ``amount``: the floor of its prices, but no time that bytes need.

    ``points``: prices (amount, microseconds) of such launches, smallest first. Of what costs the same at all sizes, nothing
    is known to overlap.
    """
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.pairwise(points)]
    rate = min([*slopes, *(y / x for x, y in points if x > 0)], default=0.0)
    if rate <= 0.0:
        return 0.0
    return max(0.0, min(points[0][1], us - rate * amount))
