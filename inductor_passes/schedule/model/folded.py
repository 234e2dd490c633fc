"""A schedule problem with a few of its many equal layers, on which a solver can try in a fraction of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from inductor_passes.schedule.model.problem import Node, Problem
from inductor_passes.schedule.model.repeats import WINDOW, Stretch, left_out, stretches

FEWEST_LAYERS, FEWEST_NODES = 6, 1500  # that are kept of a stretch
SHARE = 25  # one in so many layers is kept at least: rules look some part of the whole ahead
LARGEST = 0.15  # of the problem: a larger one saves less than a search on the whole may find


def folded(problem: Problem) -> Problem | None:
    """Return the problem without the middle of its equal layers; None where it would hardly be smaller.

    A node that is kept and depends on one that is gone depends on its like in another layer. What follows
    for the folded problem is a hint for the whole, and no more.
    """
    nodes = problem.nodes
    ids = [i for i, node in enumerate(nodes) if node.kind != "input"]
    found = [_without_middle(stretch) for stretch in stretches(looks(nodes, ids))]
    found = [stretch for stretch in found if stretch.gone]
    if not found or len(ids) - sum(len(stretch.left_out) for stretch in found) > LARGEST * len(ids):
        return None
    return _fold(problem, ids, found)


def looks(nodes: Sequence[Node], ids: Sequence[int]) -> list[int]:
    """Return a number for each of the nodes ``ids``: equal where nodes cost the same, with the same close by."""
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
