"""Equal layers once: a graph with a few of its many equal layers, in which a choice shows in a fraction of the time.

Layers are found in the order of the graph: a stretch in which each node looks like the one a *period* further on.
A joint graph has two of them, of the forward and of the backward, which meet layer by layer from opposite ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

FIRST, LAST = 1, 2  # layers that are kept at either end of a stretch
LEAST = 8  # layers, for any to be left out
WINDOW = 16  # nodes in a row that look alike, before a stretch is looked for
PERIODS = 8  # distances that are tried, those at which nodes look alike most often
ALIKE = 2  # stretches whose counts of layers differ by no more lose equally many


@dataclass(frozen=True, slots=True)
class Stretch:
    """``layers`` periods of ``period`` nodes each, from place ``start`` on; ``gone`` of them, behind the first, are left out."""

    start: int
    period: int
    layers: int
    gone: int = 0

    @property
    def end(self) -> int:
        """The place behind its last node."""
        return self.start + self.period * self.layers

    @property
    def left_out(self) -> range:
        """Places of the nodes that are left out."""
        start = self.start + FIRST * self.period
        return range(start, start + self.gone * self.period)

    def stand_in(self, place: int, before: int) -> int:
        """The place of a node that is kept, looks like the one at ``place``, and stands above place ``before``.

        It is the one that the reader would have if the first layer behind the gap were the next after the last before it.
        """
        step = self.gone * self.period
        middle = self.start + (FIRST * self.period + step // 2)
        wanted = place + step if place < middle else place - step
        if self.start <= wanted < min(before, self.end):
            return wanted
        return self.left_out.start - self.period + (place - self.start) % self.period


@dataclass(frozen=True, slots=True)
class Folded:
    """A graph in which ``kept`` of ``layers`` equal layers are left, and the node of the whole graph that each node is."""

    graph: fx.Graph
    whole: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    layers: int = 1
    kept: int = 1


def fold(graph: fx.Graph) -> Folded:
    """Return a copy without the middle layers; the graph itself where it has few.

    What is kept and reads a layer that is gone reads its like in another, so that shapes agree and every node
    costs what it did. The copy computes something else: it is for being priced.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    found = _even(list(stretches(looks(nodes))))
    if not found:
        return Folded(graph)
    place = {node: i for i, node in enumerate(nodes)}
    of = {at: stretch for stretch in found for at in stretch.left_out}

    def reads(node: fx.Node, source: fx.Node) -> fx.Node:
        at = place.get(source, -1)
        return nodes[of[at].stand_in(at, place[node])] if at in of else source

    kept = [node for at, node in enumerate(nodes) if at not in of]
    inputs = {node: {used: reads(node, used) for used in node.all_input_nodes} for node in kept}
    read = {source for sources in inputs.values() for source in sources.values()}
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node in read:
            copies[node] = made.node_copy(node)
    for node in kept:
        copies[node] = made.node_copy(node, lambda used, by=inputs[node]: copies[by[used]])  # type: ignore[misc]
    output = graph.output_node()
    made.output(tuple(copies[node] for node in output.all_input_nodes if node in copies))
    most = max(found, key=lambda stretch: stretch.layers)
    whole = {copy: node for node, copy in copies.items()}
    return Folded(made, whole, most.layers, most.layers - most.gone)


def looks(nodes: Sequence[fx.Node]) -> list[int]:
    """Return a number for each node: equal where nodes do the same on the same shapes, with the same close by."""
    numbers: dict[str, int] = {}
    place = {node: i for i, node in enumerate(nodes)}
    found = []
    for i, node in enumerate(nodes):
        near = [i - place.get(used, -1) for used in node.all_input_nodes]
        args = fx.node.map_arg((node.args, node.kwargs), lambda used: None)
        target = node.target if node.op == "call_function" else node.op
        said = f"{target} {args} {_said(node.meta.get('val'))} {[d for d in near if d <= WINDOW]}"
        found.append(numbers.setdefault(said, len(numbers)))
    return found


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


def _even(found: Sequence[Stretch]) -> list[Stretch]:
    """The stretches, each with how many of its layers are left out."""
    made: list[Stretch] = []
    for stretch in sorted(found, key=lambda s: s.layers):
        gone = stretch.layers - FIRST - LAST
        if made and stretch.layers - made[-1].gone - FIRST - LAST <= ALIKE:
            gone = made[-1].gone
        made.append(Stretch(stretch.start, stretch.period, stretch.layers, gone))
    return made


def _said(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_said, value))
    return (
        f"{value.dtype} {list(value.shape)} {value.stride()}"
        if isinstance(value, torch.Tensor)
        else ""
    )
