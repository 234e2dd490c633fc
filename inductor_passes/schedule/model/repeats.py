"""Equal layers of a program: stretches of a sequence of numbers in which each is equal to the one a *period* further on.

Whoever folds a program numbers its nodes, equal where they are alike, and leaves out what repeats: ``split/fold.py``
does so with a graph, ``folded.py`` with a schedule problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

LEAST = 8  # layers, for any to be left out
WINDOW = 16  # nodes in a row that look alike, before a stretch is looked for
PERIODS = 8  # distances that are tried, those at which nodes look alike most often
ALIKE = 2  # stretches whose counts of layers differ by no more lose equally many


@dataclass(frozen=True, slots=True)
class Stretch:
    """``layers`` periods of ``period`` nodes each, from place ``start`` on; ``gone`` of them, behind the ``first``, are left out."""

    start: int
    period: int
    layers: int
    gone: int = 0
    first: int = 1

    @property
    def end(self) -> int:
        """The place behind its last node."""
        return self.start + self.period * self.layers

    @property
    def left_out(self) -> range:
        """Places of the nodes that are left out."""
        start = self.start + self.first * self.period
        return range(start, start + self.gone * self.period)

    def stand_in(self, place: int, before: int) -> int:
        """The place of a node that is kept, looks like the one at ``place``, and stands above place ``before``.

        It is the one that the reader would have if the first layer behind the gap were the next after the last before it.
        """
        step = self.gone * self.period
        middle = self.start + (self.first * self.period + step // 2)
        wanted = place + step if place < middle else place - step
        if self.start <= wanted < min(before, self.end):
            return wanted
        return self.left_out.start - self.period + (place - self.start) % self.period


def stretches(numbers: Sequence[int]) -> Iterator[Stretch]:
    """Yield stretches of at least ``LEAST`` periods that share no place, by the most frequent periods first."""
    last: dict[tuple[int, ...], int] = {}
    distances: Counter[int] = Counter()
    for i in range(len(numbers) - WINDOW + 1):
        window = tuple(numbers[i : i + WINDOW])
        if window in last:
            distances[i - last[window]] += 1
        last[window] = i
    taken: set[int] = set()
    periods = [period for period, _ in distances.most_common(PERIODS)]
    for period in periods:
        for stretch in list(_periodic(numbers, period, taken)):
            if stretch.start in taken:
                continue
            own = min(p for p in periods if period % p == 0 and _repeats(numbers, stretch, p))
            for found in _periodic(numbers, own, taken):
                taken.update(range(found.start, found.end))
                yield found


def _repeats(numbers: Sequence[int], stretch: Stretch, period: int) -> bool:
    places = range(stretch.start, stretch.end - period)
    return all(numbers[i] == numbers[i + period] for i in places)


def _periodic(numbers: Sequence[int], period: int, taken: Collection[int]) -> Iterator[Stretch]:
    start = 0
    for i in range(len(numbers) - period + 1):
        ends = i + period == len(numbers) or numbers[i] != numbers[i + period]
        if not ends and i not in taken and i + period not in taken:
            continue
        layers = (i - start) // period + 1
        if layers >= LEAST:
            yield Stretch(start, period, layers)
        start = i + 1


def left_out(found: Sequence[Stretch], first: int, last: int) -> list[Stretch]:
    """Return the stretches, each with how many of its layers are left out: all but ``first`` and ``last`` ones.

    Stretches of about equally many layers, as a forward and its backward, lose equally many, so that layers meet.
    """
    made: list[Stretch] = []
    for stretch in sorted(found, key=lambda s: s.layers):
        gone = max(0, stretch.layers - first - last)
        if made and stretch.layers - made[-1].gone - first - last <= ALIKE:
            gone = made[-1].gone
        made.append(replace(stretch, gone=gone, first=first))
    return made
