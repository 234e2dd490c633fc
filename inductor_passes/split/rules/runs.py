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
from inductor_passes.split.rules.routed import layout_of_result, rows_layout
from inductor_passes.split.rules.rows import Addends, KeyCounts, Routed, Run
from inductor_passes.split.rules.rule import (
    SUM,
    EndsError,
    InParts,
    Layout,
    Rule,
    dims_of,
    extents,
    source_of,
)

Layouts = Mapping[fx.Node, Layout]


def taken_apart(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Cut rows into runs of keys, of as many rows as are counted; or cut along another
    dimension.
    """
    source, sizes = source_of(node), node.args[1]
    layout = rows_layout(source, layouts[source])
    (at,) = dims_of(node, len(extents(source)), default=0)
    if at != layout.dim:
        return routed.along_rows(node, layouts, parts)
    count = len(node.meta["val"])
    counts = sizes_in_order(sizes, count, layouts)
    # Sizes of the whole would cut a chunk's rows at wrong places: only counts of the keys they are
    # sorted by follow the chunk.
    if counts is None or not counts.are_in(layout.rows) or layout.points is not None:
        raise EndsError("its pieces are not runs of the keys by which its rows are sorted")
    share = counts.groups // count
    runs = (tuple(range(i * share, (i + 1) * share)) for i in range(count))
    found = (Run(replace(counts, at=at), layout.rows) for at in runs)
    lies = tuple(Routed(layout.dim, run, by=layout.keys) for run in found)
    return InParts(lies, dict(layouts))


def runs_between(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Take runs of keys, by where counts say that they begin and end; or a piece along another
    dimension.
    """
    source = source_of(node)
    start, end = argument(node, "start"), argument(node, "end")
    if not isinstance(start, fx.Node) and not isinstance(end, fx.Node):
        return routed.piece_of_rows(node, layouts, parts)
    layout = rows_layout(source, layouts.get(source))
    (at,) = dims_of(node, len(extents(source)), default=0)
    bounds = [_before(bound, layouts) for bound in (start, end)]
    several = {replace(counts, at=None) for counts in bounds if counts is not None}
    if at != layout.dim or layout.points is not None or len(several) != 1:
        raise EndsError("it takes rows that are no runs of keys")
    (counts,) = several
    first, last = (len(c.at or ()) if c is not None else 0 for c in bounds)
    if not isinstance(end, fx.Node):
        last = counts.groups if isinstance(end, int) and end >= 2**62 else -1
    if (start not in (None, 0) and bounds[0] is None) or first >= last:
        raise EndsError("it takes rows that are no runs of keys")
    if argument(node, "step") not in (None, 1) or not counts.are_in(layout.rows):
        raise EndsError("its pieces are not runs of the keys by which its rows are sorted")
    run = Run(replace(counts, at=tuple(range(first, last))), layout.rows)
    return InParts(Routed(at, run, by=layout.keys), dict(layouts))


def _before(bound: object, layouts: Layouts) -> KeyCounts | None:
    """Return the counts of all runs before a bound."""
    layout = layouts.get(bound) if isinstance(bound, fx.Node) else None
    counts = layout.counts if isinstance(layout, Addends) else None
    if counts is None or counts.at is None or sorted(counts.at) != list(range(len(counts.at))):
        return None
    return replace(counts, at=tuple(sorted(counts.at)))


def put_together(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Join all runs of keys in order, which are all rows; or join along another dimension."""
    joined = node.args[0]
    assert isinstance(joined, (list, tuple))
    found = [rows_layout(n, layouts[n]) for n in joined if isinstance(n, fx.Node) and n in layouts]
    (at,) = dims_of(node, len(extents(node)), default=0)
    if len(found) < len(joined) or any(layout.dim != at for layout in found):
        return routed.cat_rows(node, layouts, parts)
    runs = [layout.rows for layout in found if isinstance(layout.rows, Run)]
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
    return InParts(layout_of_result(node, made), dict(layouts))


def grouped_product(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Multiply rows by the weights of their run of keys; or make the gradients of these, which
    are sums over the parts.
    """
    a, b, ends = node.args[0], argument(node, "mat2"), argument(node, "offs")
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    ends_at = layouts.get(ends) if isinstance(ends, fx.Node) else None
    counts = ends_at.ends if isinstance(ends_at, Addends) else None
    if counts is None or argument(node, "bias") is not None:
        raise EndsError("it multiplies by weights of runs that are not counted")
    left = rows_layout(a, layouts[a]) if a in layouts else None
    right = rows_layout(b, layouts[b]) if b in layouts else None
    for layout in (left, right):
        if layout is not None and (layout.points is not None or not counts.are_in(layout.rows)):
            raise EndsError("its rows are not sorted by the keys that are counted")
    reads: dict[fx.Node, Layout] = dict(layouts)
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
