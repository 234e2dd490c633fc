"""Find equal layers, and make a problem with a few of them that a solver tries much faster.

Code that folds a program numbers its nodes, with equal numbers for equal nodes, and leaves out what
repeats. ``split/price.py`` does so with a graph, and ``folded`` here with a schedule problem.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from inductor_passes.schedule.solver.problem import Node, Problem

LEAST = 8  # layers, for any to be left out
WINDOW = 16  # nodes in a row that look alike, before a stretch is looked for
PERIODS = 8  # distances that are tried, those at which nodes look alike most often
ALIKE = 2  # stretches whose counts of layers differ by no more lose equally many


@dataclass(frozen=True, slots=True)
class Stretch:
    """Describe ``layers`` periods of ``period`` nodes each, from place ``start`` on.

    ``gone`` of the layers, after the ``first`` ones, are left out.
    """

    start: int
    period: int
    layers: int
    gone: int = 0
    first: int = 1

    @property
    def end(self) -> int:
        """Return the place after its last node."""
        return self.start + self.period * self.layers

    @property
    def left_out(self) -> range:
        """Places of the nodes that are left out."""
        start = self.start + self.first * self.period
        return range(start, start + self.gone * self.period)

    def stand_in(self, place: int, before: int) -> int:
        """Return the place of a kept node that looks like that at ``place``, above ``before``.

        It is the node that the reader would have if the first layer after the gap came directly
        after the last layer before it.
        """
        step = self.gone * self.period
        middle = self.start + (self.first * self.period + step // 2)
        wanted = place + step if place < middle else place - step
        if self.start <= wanted < min(before, self.end):
            return wanted
        return self.left_out.start - self.period + (place - self.start) % self.period


def stretches(numbers: Sequence[int]) -> Iterator[Stretch]:
    """Yield stretches of at least ``LEAST`` periods that share no place, by the most frequent
    periods first.
    """
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
    """Return the stretches, each with how many of its layers are left out: all but ``first`` and
    ``last`` ones.

    Stretches of about equally many layers, as a forward and its backward, lose equally many, so
    that layers meet.
    """
    made: list[Stretch] = []
    for stretch in sorted(found, key=lambda s: s.layers):
        gone = max(0, stretch.layers - first - last)
        if made and stretch.layers - made[-1].gone - first - last <= ALIKE:
            gone = made[-1].gone
        made.append(replace(stretch, gone=gone, first=first))
    return made


FEWEST_LAYERS, FEWEST_NODES = 6, 1500  # that are kept of a stretch
SHARE = 25  # one in so many layers is kept at least: rules look some part of the whole ahead
LARGEST = 0.15  # of the problem: a larger one saves less than a search on the whole may find


def folded(problem: Problem) -> Problem | None:
    """Return the problem without the middle of its equal layers; None where it would hardly be
    smaller.

    A node that is kept and depends on one that is gone depends on its like in another layer. What
    follows for the folded problem is a hint for the whole, and no more.
    """
    nodes = problem.nodes
    ids = [i for i, node in enumerate(nodes) if node.kind != "input"]
    found = [_without_middle(stretch) for stretch in stretches(looks(nodes, ids))]
    found = [stretch for stretch in found if stretch.gone]
    if not found or len(ids) - sum(len(stretch.left_out) for stretch in found) > LARGEST * len(ids):
        return None
    return _fold(problem, ids, found)


def looks(nodes: Sequence[Node], ids: Sequence[int]) -> list[int]:
    """Return a number for each of the nodes ``ids``: equal where nodes cost the same, with the
    same close by.
    """
    numbers: dict[object, int] = {}
    place = {i: at for at, i in enumerate(ids)}
    found = []
    for at, i in enumerate(ids):
        node = nodes[i]
        near = tuple(at - place[d] for d in node.deps if at - place.get(d, -2 * WINDOW) <= WINDOW)
        does = node.kind, node.us, node.bytes, node.alias is None, node.launch is None
        look = does, node.merge_key, node.payload, near
        found.append(numbers.setdefault(look, len(numbers)))
    return found


def _without_middle(stretch: Stretch) -> Stretch:
    kept = max(FEWEST_LAYERS, -(-FEWEST_NODES // stretch.period), stretch.layers // SHARE)
    return left_out([stretch], kept // 2, kept - kept // 2)[0]


def _fold(problem: Problem, ids: Sequence[int], found: Sequence[Stretch]) -> Problem:
    nodes = problem.nodes
    place = {i: at for at, i in enumerate(ids)}
    of = {at: stretch for stretch in found for at in stretch.left_out}

    def read(i: int, d: int) -> int:
        """The node that node i depends on in place of d."""
        at = place.get(d, -1)
        return ids[of[at].stand_in(at, place[i])] if at in of else d

    kept = {i for at, i in enumerate(ids) if at not in of}
    reads = {i: {d: read(i, d) for d in _named(nodes[i])} for i in kept}
    kept.update(d for named in reads.values() for d in named.values())
    number = {i: n for n, i in enumerate(sorted(kept))}
    made = []
    for i in number:
        node, named = nodes[i], reads.get(i)
        if named is None:  # an input
            made.append(replace(node, deps=(), alias=None))
            continue
        to = {d: number[of_d] for d, of_d in named.items()}
        deps = tuple(sorted({to[d] for d in node.deps}))
        alias, launch = _at(to, node.alias), _at(to, node.launch)
        made.append(replace(node, deps=deps, alias=alias, launch=launch))
    return replace(problem, nodes=tuple(made))


def _named(node: Node) -> set[int]:
    """The nodes that a node names."""
    return {*node.deps, *(i for i in (node.alias, node.launch) if i is not None)}


def _at(to: Mapping[int, int], i: int | None) -> int | None:
    return None if i is None else to[i]
