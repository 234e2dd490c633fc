"""Compute a sorted value run by run, such as the adjacent rows of one expert.

A run has as many rows as its counts say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import aten
from inductor_passes.split.rules import routed
from inductor_passes.split.rules.counting import sizes_in_order
from inductor_passes.split.rules.routed import lying, settled
from inductor_passes.split.rules.rows import Addends, KeyCounts, Routed, Run
from inductor_passes.split.rules.rule import (
    SUM,
    EndsError,
    InParts,
    Place,
    Rule,
    dims_of,
    extents,
    source_of,
)

Places = Mapping[fx.Node, Place]


def taken_apart(node: fx.Node, places: Places, parts: int) -> InParts:
    """Cut rows into runs of keys, of as many rows as are counted; or cut along another
    dimension.
    """
    source, sizes = source_of(node), node.args[1]
    place = lying(source, places[source])
    (at,) = dims_of(node, len(extents(source)), default=0)
    if at != place.dim:
        return routed.along_rows(node, places, parts)
    count = len(node.meta["val"])
    counts = sizes_in_order(sizes, count, places)
    # Sizes of the whole would cut a chunk's rows at wrong places: only counts of the keys they are
    # sorted by follow the chunk.
    if counts is None or not counts.are_in(place.rows) or place.points is not None:
        raise EndsError("its pieces are not runs of the keys by which its rows are sorted")
    share = counts.groups // count
    runs = (tuple(range(i * share, (i + 1) * share)) for i in range(count))
    found = (Run(replace(counts, at=at), place.rows) for at in runs)
    lies = tuple(Routed(place.dim, run, by=place.keys) for run in found)
    return InParts(lies, dict(places))


def runs_between(node: fx.Node, places: Places, parts: int) -> InParts:
    """Take runs of keys, by where counts say that they begin and end; or a piece along another
    dimension.
    """
    source = source_of(node)
    start, end = argument(node, "start"), argument(node, "end")
    if not isinstance(start, fx.Node) and not isinstance(end, fx.Node):
        return routed.piece_of_rows(node, places, parts)
    place = lying(source, places.get(source))
    (at,) = dims_of(node, len(extents(source)), default=0)
    bounds = [_before(bound, places) for bound in (start, end)]
    several = {replace(counts, at=None) for counts in bounds if counts is not None}
    if at != place.dim or place.points is not None or len(several) != 1:
        raise EndsError("it takes rows that are no runs of keys")
    (counts,) = several
    first, last = (len(c.at or ()) if c is not None else 0 for c in bounds)
    if not isinstance(end, fx.Node):
        last = counts.groups if isinstance(end, int) and end >= 2**62 else -1
    if (start not in (None, 0) and bounds[0] is None) or first >= last:
        raise EndsError("it takes rows that are no runs of keys")
    if argument(node, "step") not in (None, 1) or not counts.are_in(place.rows):
        raise EndsError("its pieces are not runs of the keys by which its rows are sorted")
    run = Run(replace(counts, at=tuple(range(first, last))), place.rows)
    return InParts(Routed(at, run, by=place.keys), dict(places))


def _before(bound: object, places: Places) -> KeyCounts | None:
    """Return the counts of all runs before a bound."""
    place = places.get(bound) if isinstance(bound, fx.Node) else None
    counts = place.counts if isinstance(place, Addends) else None
    if counts is None or counts.at is None or sorted(counts.at) != list(range(len(counts.at))):
        return None
    return replace(counts, at=tuple(sorted(counts.at)))


def put_together(node: fx.Node, places: Places, parts: int) -> InParts:
    """Join all runs of keys in order, which are all rows; or join along another dimension."""
    joined = node.args[0]
    assert isinstance(joined, (list, tuple))
    found = [lying(n, places[n]) for n in joined if isinstance(n, fx.Node) and n in places]
    (at,) = dims_of(node, len(extents(node)), default=0)
    if len(found) < len(joined) or any(place.dim != at for place in found):
        return routed.cat_rows(node, places, parts)
    runs = [place.rows for place in found if isinstance(place.rows, Run)]
    of = {replace(run.counts, at=None) for run in runs}
    held = [i for run in runs for i in run.counts.at or ()]
    # Together again the runs must be all runs, in order: only then the rows are those that were
    # cut.
    if len(runs) < len(found) or len(of) != 1 or held != list(range(of.pop().groups)):
        raise EndsError("it joins rows of parts behind each other")
    rows = runs[0].of
    if rows is None or any(run.of != rows for run in runs):
        raise EndsError(routed.UNLIKE)
    made = Routed(at, rows, by=found[0].keys)
    return InParts(settled(node, made), dict(places))


def grouped_product(node: fx.Node, places: Places, parts: int) -> InParts:
    """Multiply rows by the weights of their run of keys; or make the gradients of these, which
    are sums over the parts.
    """
    a, b, ends = node.args[0], argument(node, "mat2"), argument(node, "offs")
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    told = places.get(ends) if isinstance(ends, fx.Node) else None
    counts = told.ends if isinstance(told, Addends) else None
    if counts is None or argument(node, "bias") is not None:
        raise EndsError("it multiplies by weights of runs that are not counted")
    left = lying(a, places[a]) if a in places else None
    right = lying(b, places[b]) if b in places else None
    for place in (left, right):
        if place is not None and (place.points is not None or not counts.are_in(place.rows)):
            raise EndsError("its rows are not sorted by the keys that are counted")
    reads: dict[fx.Node, Place] = dict(places)
    # Rows times the weights of their run: each chunk has rows of every run, and reads all weights.
    if left is not None and right is None and left.dim == 0:
        return InParts(Routed(0, left.rows, by=left.keys), reads)
    if left is None or right is None or (left.dim, right.dim) != (1, 0):
        raise EndsError("its operands lie in unlike parts")
    return InParts(SUM, reads)


RULES: dict[object, Rule] = {
    aten.split_with_sizes.default: taken_apart,
    aten.slice.Tensor: runs_between,
    aten.cat.default: put_together,
    **({aten._grouped_mm.default: grouped_product} if hasattr(aten, "_grouped_mm") else {}),
}
