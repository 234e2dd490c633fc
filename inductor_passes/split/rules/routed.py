"""Operators that keep rows apart, on rows in a part's own order: each row of the whole is
computed in the part that has it.

Some compute sorted rows run by run, such as the adjacent rows of one expert: ``RULES_OF_RUNS``. A
run has as many rows as its counts say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import aten, prims
from inductor_passes.split.rules import dense
from inductor_passes.split.rules.counting import sizes_in_order, takes_all
from inductor_passes.split.rules.dense import PLUS, is_elementwise
from inductor_passes.split.rules.rows import (
    Addends,
    Alike,
    Base,
    KeyCounts,
    Routed,
    Rows,
    Run,
    count_of,
)
from inductor_passes.split.rules.rule import (
    NO_ROWS,
    SUM,
    Cut,
    EndsError,
    InParts,
    Layout,
    Layouts,
    Rule,
    dims_of,
    extents,
    filled_with,
    of_each_result,
    smaller,
    source_of,
)
from inductor_passes.split.rules.views import permute, reshaped, squeeze, unsqueeze

_FILLED_LIKE = (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)
_SAME = (
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
)
UNLIKE = "its inputs have rows in unlike orders"


def rows_of_source(node: fx.Node, layouts: Layouts) -> tuple[fx.Node, Routed]:
    """Return the first argument, and its rows."""
    source = source_of(node)
    return source, rows_layout(source, layouts.get(source))


def rows_layout(node: fx.Node, layout: object) -> Routed:
    """Return a layout as one of rows; those of a ``Cut`` are in the order of the whole."""
    if isinstance(layout, Cut):
        return Routed(layout.dim, Base(extents(node)[layout.dim], layout.outer))
    if not isinstance(layout, Routed):
        raise EndsError(NO_ROWS)
    return layout


def layout_of_result(node: fx.Node, layout: Routed) -> Cut | Routed:
    """Return the layout of a result: rows in the order of the whole are an ordinary cut, if the
    size of it is known.
    """
    rows = layout.rows
    known = isinstance(rows, Base) and extents(node)[layout.dim] == rows.size
    if known and layout.points is None and isinstance(rows, Base):
        return Cut(layout.dim, rows.outer)
    return layout


def agreed(several: Iterable[Rows]) -> Rows:
    """Return the rows that values share. Raises EndsError if their orders or counts differ."""
    found = list(dict.fromkeys(several))
    ordered = [rows for rows in found if not isinstance(rows, Alike)]
    # Rows of a chunk are in its own order: added elementwise to rows of another order, each would
    # meet a stranger.
    if len(ordered) > 1 or len({count_of(rows) for rows in found}) > 1:
        raise EndsError(UNLIKE)
    return ordered[0] if ordered else found[0]


def sliced(node: fx.Node, dim: int, rows: Rows) -> Cut:
    """Return in which parts a whole value is read beside rows: of those in its order, or all
    equal.
    """
    base = count_of(rows) if filled_with(node) is not None else rows
    # A whole value can be cut beside rows only in the order of the whole, or where all its elements
    # are equal.
    if not isinstance(base, Base) or extents(node)[dim] != base.size:
        raise EndsError("it reads a whole value row by row, in an order that parts do not share")
    return Cut(dim, base.outer)


def elementwise_rows(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Align inputs from the right; all of them have their rows in one order."""
    rank = len(extents(node))
    found = {
        source: rows_layout(source, layout).moved(rank - len(extents(source)))
        for source, layout in layouts.items()
    }
    dims = {layout.dim for layout in found.values()}
    if len(dims) != 1:
        raise EndsError("its inputs lie in unlike parts")
    (dim,) = dims
    rows = agreed(layout.rows for layout in found.values())
    reads: dict[fx.Node, Layout] = dict(layouts)
    for source in node.all_input_nodes:
        if source in reads or not isinstance(source.meta.get("val"), torch.Tensor):
            continue
        shape = extents(source)
        own = dim + len(shape) - rank
        if own >= 0 and shape[own] != 1:
            reads[source] = sliced(source, own, rows)
    by = next((layout.keys for layout in found.values() if layout.keys is not None), None)
    made = Routed(dim, rows, by=by)
    if node.target in _FILLED_LIKE:
        made = Routed(dim, Alike(count_of(rows)), by=by)
    elif node.target in _SAME and len(found) == 1:
        made = next(iter(found.values()))
    elif any(layout.points is not None for layout in found.values()):
        if len(found) > 1 or len(node.all_input_nodes) > 1:
            raise EndsError("it computes with places of rows")
        ((source, layout),) = found.items()
        made = _computed_places(node, layout, parts)
    return InParts(layout_of_result(node, made), reads)


def _computed_places(node: fx.Node, layout: Routed, parts: int) -> Routed:
    """Return what a number of places is: of several rows of one token the token, or which of its
    rows.
    """
    by = node.args[1] if len(node.args) > 1 else None
    rows = layout.points
    if isinstance(rows, Base) and isinstance(by, int) and by > 0:
        # With k rows a token, index // k names the token only if a chunk holds whole tokens.
        if rows.size // (rows.outer * parts) % by == 0:
            floors = node.target is aten.floor_divide.default or (
                argument(node, "rounding_mode") == "floor"
            )
            if floors:
                points = Base(rows.size // by, rows.outer)
                return Routed(layout.dim, layout.rows, points, by=layout.keys)
            if node.target is aten.remainder.Scalar:
                return layout.plain()
    raise EndsError("it computes with places of rows")


def reshape_rows(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Keep the rows as a dimension; those in the order of the whole may be viewed in any way
    that keeps parts apart.
    """
    source = source_of(node)
    if source not in layouts:
        raise EndsError("its value is whole, its sizes are those of a part")
    given, layout = layouts[source], rows_layout(source, layouts[source])
    before, after = extents(source), extents(node)
    if isinstance(layout.rows, Base) and layout.points is None:
        before = tuple(layout.rows.size if i == layout.dim else x for i, x in enumerate(before))
        after = _filled_in(after, math.prod(before))
        made = reshaped(Cut(layout.dim, layout.rows.outer), before, after, parts)
        args = (source, smaller(after, made.dim, parts))
        by = next((p.keys for p in layouts.values() if isinstance(p, (Routed, Addends))), None)
        lies = Routed(made.dim, Base(after[made.dim], made.outer), by=by)
        return InParts(layout_of_result(node, lies), {source: given}, args)
    for dim, size in enumerate(after):
        others = (*after[:dim], *after[dim + 1 :])
        if size != before[layout.dim] or not all(isinstance(x, int) for x in others):
            continue
        if math.prod(after[:dim]) == math.prod(before[: layout.dim]):
            args = (source, [-1 if i == dim else x for i, x in enumerate(after)])
            return InParts(layout.at(dim), {source: given}, args)
    raise EndsError("it takes rows apart that a part has in an order of its own")


def _filled_in(shape: tuple[Any, ...], count: object) -> tuple[int, ...]:
    """Return a shape whose one symbol, if any, is what the number of elements leaves."""
    known = [size for size in shape if isinstance(size, int)]
    rest = math.prod(known)
    if not isinstance(count, int) or len(known) < len(shape) - 1 or not rest or count % rest:
        raise EndsError("its sizes are symbols")
    return tuple(size if isinstance(size, int) else count // rest for size in shape)


def expand_rows(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Repeat along other dimensions; or one row as often as a part has rows."""
    source, after = source_of(node), extents(node)
    if source not in layouts:
        dim, layout, size = _sized(node, node.args[1], layouts)
        own = dim + len(extents(source)) - len(after)
        if own >= 0 and extents(source)[own] != 1:
            raise EndsError("its value is whole, its sizes are those of a part")
        return InParts(layout, {size: layouts[size]})
    layout = rows_layout(source, layouts[source]).moved(len(after) - len(extents(source)))
    sizes = [-1 if i == layout.dim else size for i, size in enumerate(after)]
    if not all(isinstance(size, int) for size in sizes):
        raise EndsError("its sizes are symbols")
    return InParts(
        layout_of_result(node, layout),
        {source: layouts[source]},
        (source, sizes, *node.args[2:]),
    )


def filled(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Make as many rows as a chunk has, all of them equal."""
    sizes = argument(node, "size")
    _, layout, size = _sized(node, sizes, layouts)
    return InParts(layout, {size: layouts[size]})


def filled_anew(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Make a value of equal elements with the type of a chunk; with known sizes it is whole."""
    source = source_of(node)
    if source not in layouts:
        return filled(node, layouts, parts)
    if all(isinstance(size, int) for size in extents(node)):
        return InParts(SUM, {source: layouts[source]}, once=True)
    _, layout, size = _sized(node, argument(node, "size"), layouts)
    return InParts(layout, {source: layouts[source], size: layouts[size]})


def _sized(node: fx.Node, sizes: object, layouts: Layouts) -> tuple[int, Routed, fx.Node]:
    """Return the dimension whose size is the number of a part's rows, how the result lies, and
    the size.
    """
    assert isinstance(sizes, (list, tuple))
    found = [(dim, size) for dim, size in enumerate(sizes) if size in layouts]
    if len(found) != 1:
        raise EndsError("several of its sizes are those of a part")
    ((dim, size),) = found
    layout = layouts[size]
    if not isinstance(layout, Addends) or layout.total is None:
        raise EndsError("one of its sizes is a count, and not the number of all rows")
    return dim, Routed(dim, Alike(layout.total), by=layout.keys), size


def _apart(layout: Routed, dims: list[int]) -> None:
    if layout.dim in dims:
        raise EndsError("it mixes rows, and those of other parts belong to them")


def piece_of_rows(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Take a piece along another dimension, or all of the rows."""
    source, layout = rows_of_source(node, layouts)
    (at,) = dims_of(node, len(extents(source)), default=0)
    if not takes_all(node):
        _apart(layout, [at])
    less = node.target is aten.select.int and at < layout.dim
    return InParts(layout.moved(-less), {source: layouts[source]})


def along_rows(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Work along another dimension: sort, pick, accumulate or normalize there."""
    source, layout = rows_of_source(node, layouts)
    if layout.points is not None or len(layouts) > 1:
        raise EndsError("it computes with places of rows, or with other values")
    _apart(layout, dims_of(node, len(extents(source)), default=-1))
    return InParts(of_each_result(node, layout), {source: layouts[source]})


def reduce_rows(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Count the dimensions that go; over rows, a sum is that of the sums of parts."""
    source, layout = rows_of_source(node, layouts)
    if layout.points is not None:
        raise EndsError("it computes with places of rows")
    rank = len(extents(source))
    dims = dims_of(node, rank, default=list(range(rank))) or list(range(rank))
    reads: dict[fx.Node, Layout] = {source: layouts[source]}
    if layout.dim not in dims:
        gone = 0 if argument(node, "keepdim") else sum(dim < layout.dim for dim in set(dims))
        return InParts(of_each_result(node, layout.moved(-gone)), reads)
    # A chunk may have got no rows at all from the router: the largest of nothing has no value.
    if node.target not in _OF_NONE:
        raise EndsError("it reduces over rows, of which a part may have none, and is no sum")
    return InParts(SUM, reads, plus=PLUS[node.target])


# Reductions that are defined over no rows.
_OF_NONE = (
    aten.sum.default,
    aten.sum.dim_IntList,
    *(aten.any.default, aten.any.dim, aten.any.dims),
    *(aten.all.default, aten.all.dim, aten.all.dims),
)


def cat_rows(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Join along another dimension."""
    joined = node.args[0]
    assert isinstance(joined, (list, tuple))
    (at,) = dims_of(node, len(extents(node)), default=0)
    if len(set(joined) - set(layouts)) > 0:
        raise EndsError("it joins whole values to rows in an order that parts do not share")
    found = [
        rows_layout(source, layouts[source]) for source in joined if isinstance(source, fx.Node)
    ]
    rows = agreed(layout.rows for layout in found)
    dims = {layout.dim for layout in found}
    if len(dims) != 1 or at in dims or any(layout.points is not None for layout in found):
        raise EndsError("it joins rows of parts behind each other")
    made = Routed(dims.pop(), rows, by=found[0].keys)
    return InParts(layout_of_result(node, made), dict(layouts))


def product_of_rows(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Keep rows, or columns, apart; along rows, the product is the sum of those of the parts."""
    a, b = node.args[-2:]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    rank = len(extents(node))
    bias = node.args[0] if len(node.args) > 2 else None
    if bias in layouts or rank != 2:
        raise EndsError("its bias, or a batch of products, lies in parts")
    left = rows_layout(a, layouts[a]) if a in layouts else None
    right = rows_layout(b, layouts[b]) if b in layouts else None
    if any(layout is not None and layout.points is not None for layout in (left, right)):
        raise EndsError("it computes with places of rows")
    if left is not None and right is not None:
        if (left.dim, right.dim) != (1, 0):
            raise EndsError("its operands lie in unlike parts")
        agreed((left.rows, right.rows))
        if any(argument(node, name) not in (None, 1) for name in ("alpha", "beta")) or a is b:
            raise EndsError("its sum is scaled, or of one value with itself")
        return InParts(SUM, dict(layouts))
    layout = left or right
    if layout is None or layout.dim != (0 if left is not None else 1):
        raise EndsError("it adds along rows, and reads a whole value beside them")
    if bias is not None:
        shape = extents(bias)
        own = layout.dim + len(shape) - rank
        if own >= 0 and shape[own] != 1:
            raise EndsError("it reads a whole bias row by row")
    return InParts(layout_of_result(node, layout), dict(layouts))


def wait_for_rows(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Wait for the launch of a part."""
    source = source_of(node)
    return InParts(layouts[source], {source: layouts[source]})


RULES: dict[object, Rule] = {
    torch.ops._c10d_functional.wait_tensor.default: wait_for_rows,
    **dict.fromkeys(
        (aten.view.default, aten.reshape.default, aten._unsafe_view.default), reshape_rows
    ),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), permute),
    aten.unsqueeze.default: unsqueeze,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), squeeze),
    aten.expand.default: expand_rows,
    **dict.fromkeys((aten.full.default, aten.zeros.default, aten.ones.default), filled),
    **dict.fromkeys(
        (aten.new_zeros.default, aten.new_ones.default, aten.new_full.default), filled_anew
    ),
    aten.select.int: piece_of_rows,
    **dict.fromkeys(
        (
            aten.topk.default,
            aten.cumsum.default,
            aten._softmax.default,
            aten._log_softmax.default,
            aten.split.Tensor,
        ),
        along_rows,
    ),
    **dict.fromkeys(
        (*PLUS, aten.argmax.default, aten.var.correction, aten.var_mean.correction), reduce_rows
    ),
    **dict.fromkeys(dense.ADDING, product_of_rows),
}


def rule_of_rows(target: object) -> Rule:
    """Return the rule of an operator on rows. Raises EndsError if there is none."""
    if target in RULES:
        return RULES[target]
    random = isinstance(target, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in target.tags
    )
    if is_elementwise(target) and not random:
        return elementwise_rows
    raise EndsError("it has no rule for rows in a part's own order")


def taken_apart(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Cut rows into runs of keys, of as many rows as are counted; or cut along another
    dimension.
    """
    sizes = node.args[1]
    source, layout = rows_of_source(node, layouts)
    (at,) = dims_of(node, len(extents(source)), default=0)
    if at != layout.dim:
        return along_rows(node, layouts, parts)
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
        return piece_of_rows(node, layouts, parts)
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
        return cat_rows(node, layouts, parts)
    runs = [layout.rows for layout in found if isinstance(layout.rows, Run)]
    of = {replace(run.counts, at=None) for run in runs}
    held = [i for run in runs for i in run.counts.at or ()]
    # Together again the runs must be all runs, in order: only then the rows are those that were
    # cut.
    if len(runs) < len(found) or len(of) != 1 or held != list(range(of.pop().groups)):
        raise EndsError("it joins rows of parts behind each other")
    rows = runs[0].of
    if rows is None or any(run.of != rows for run in runs):
        raise EndsError(UNLIKE)
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


RULES_OF_RUNS: dict[object, Rule] = {
    aten.split_with_sizes.default: taken_apart,
    aten.slice.Tensor: runs_between,
    aten.cat.default: put_together,
    **({aten._grouped_mm.default: grouped_product} if hasattr(aten, "_grouped_mm") else {}),
}
