"""Operators that keep rows apart, on rows in a part's own order: each row of the whole is
computed in the part that has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import aten, prims
from inductor_passes.split.rules import dense
from inductor_passes.split.rules.dense import PLUS, is_elementwise
from inductor_passes.split.rules.rows import Addends, Alike, Base, Routed, Rows, count_of
from inductor_passes.split.rules.rule import (
    SUM,
    Cut,
    EndsError,
    InParts,
    Place,
    Rule,
    dims_of,
    extents,
    filled_with,
    smaller,
    source_of,
)
from inductor_passes.split.rules.views import order_of, reshaped

Places = Mapping[fx.Node, Place]
_FILLED_LIKE = (aten.full_like.default, aten.zeros_like.default, aten.ones_like.default)
_SAME = (
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
)
UNLIKE = "its inputs have rows in unlike orders"


def lying(node: fx.Node, place: object) -> Routed:
    """Return a place as one of rows; those of a ``Cut`` are in the order of the whole."""
    if isinstance(place, Cut):
        return Routed(place.dim, Base(extents(node)[place.dim], place.outer))
    if not isinstance(place, Routed):
        raise EndsError("it takes a count, or several values, for rows")
    return place


def settled(node: fx.Node, place: Routed) -> Cut | Routed:
    """Return the place of a result: rows in the order of the whole are an ordinary cut, if the
    size of it is known.
    """
    rows = place.rows
    known = isinstance(rows, Base) and extents(node)[place.dim] == rows.size
    if known and place.points is None and isinstance(rows, Base):
        return Cut(place.dim, rows.outer)
    return place


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


def elementwise_rows(node: fx.Node, places: Places, parts: int) -> InParts:
    """Align inputs from the right; all of them have their rows in one order."""
    rank = len(extents(node))
    found = {
        source: lying(source, place).moved(rank - len(extents(source)))
        for source, place in places.items()
    }
    dims = {place.dim for place in found.values()}
    if len(dims) != 1:
        raise EndsError("its inputs lie in unlike parts")
    (dim,) = dims
    rows = agreed(place.rows for place in found.values())
    reads: dict[fx.Node, Place] = dict(places)
    for source in node.all_input_nodes:
        if source in reads or not isinstance(source.meta.get("val"), torch.Tensor):
            continue
        shape = extents(source)
        own = dim + len(shape) - rank
        if own >= 0 and shape[own] != 1:
            reads[source] = sliced(source, own, rows)
    by = next((place.keys for place in found.values() if place.keys is not None), None)
    made = Routed(dim, rows, by=by)
    if node.target in _FILLED_LIKE:
        made = Routed(dim, Alike(count_of(rows)), by=by)
    elif node.target in _SAME and len(found) == 1:
        made = next(iter(found.values()))
    elif any(place.points is not None for place in found.values()):
        if len(found) > 1 or len(node.all_input_nodes) > 1:
            raise EndsError("it computes with places of rows")
        ((source, place),) = found.items()
        made = _computed_places(node, place, parts)
    return InParts(settled(node, made), reads)


def _computed_places(node: fx.Node, place: Routed, parts: int) -> Routed:
    """Return what a number of places is: of several rows of one token the token, or which of its
    rows.
    """
    by = node.args[1] if len(node.args) > 1 else None
    rows = place.points
    if isinstance(rows, Base) and isinstance(by, int) and by > 0:
        # With k rows a token, index // k names the token only if a chunk holds whole tokens.
        if rows.size // (rows.outer * parts) % by == 0:
            floors = node.target is aten.floor_divide.default or (
                argument(node, "rounding_mode") == "floor"
            )
            if floors:
                points = Base(rows.size // by, rows.outer)
                return Routed(place.dim, place.rows, points, by=place.keys)
            if node.target is aten.remainder.Scalar:
                return place.plain()
    raise EndsError("it computes with places of rows")


def reshape_rows(node: fx.Node, places: Places, parts: int) -> InParts:
    """Keep the rows as a dimension; those in the order of the whole may be viewed in any way
    that keeps parts apart.
    """
    source = source_of(node)
    if source not in places:
        raise EndsError("its value is whole, its sizes are those of a part")
    given, place = places[source], lying(source, places[source])
    before, after = extents(source), extents(node)
    if isinstance(place.rows, Base) and place.points is None:
        before = tuple(place.rows.size if i == place.dim else x for i, x in enumerate(before))
        after = _filled_in(after, math.prod(before))
        made = reshaped(Cut(place.dim, place.rows.outer), before, after, parts)
        args = (source, smaller(after, made.dim, parts))
        by = next((p.keys for p in places.values() if isinstance(p, (Routed, Addends))), None)
        lies = Routed(made.dim, Base(after[made.dim], made.outer), by=by)
        return InParts(settled(node, lies), {source: given}, args)
    for dim, size in enumerate(after):
        others = (*after[:dim], *after[dim + 1 :])
        if size != before[place.dim] or not all(isinstance(x, int) for x in others):
            continue
        if math.prod(after[:dim]) == math.prod(before[: place.dim]):
            args = (source, [-1 if i == dim else x for i, x in enumerate(after)])
            return InParts(place.at(dim), {source: given}, args)
    raise EndsError("it takes rows apart that a part has in an order of its own")


def _filled_in(shape: tuple[Any, ...], count: object) -> tuple[int, ...]:
    """Return a shape whose one symbol, if any, is what the number of elements leaves."""
    known = [size for size in shape if isinstance(size, int)]
    rest = math.prod(known)
    if not isinstance(count, int) or len(known) < len(shape) - 1 or not rest or count % rest:
        raise EndsError("its sizes are symbols")
    return tuple(size if isinstance(size, int) else count // rest for size in shape)


def expand_rows(node: fx.Node, places: Places, parts: int) -> InParts:
    """Repeat along other dimensions; or one row as often as a part has rows."""
    source, after = source_of(node), extents(node)
    if source not in places:
        dim, place, size = _sized(node, node.args[1], places)
        own = dim + len(extents(source)) - len(after)
        if own >= 0 and extents(source)[own] != 1:
            raise EndsError("its value is whole, its sizes are those of a part")
        return InParts(place, {size: places[size]})
    place = lying(source, places[source]).moved(len(after) - len(extents(source)))
    sizes = [-1 if i == place.dim else size for i, size in enumerate(after)]
    if not all(isinstance(size, int) for size in sizes):
        raise EndsError("its sizes are symbols")
    return InParts(
        settled(node, place),
        {source: places[source]},
        (source, sizes, *node.args[2:]),
    )


def filled(node: fx.Node, places: Places, parts: int) -> InParts:
    """Make as many rows as a chunk has, all of them equal."""
    sizes = argument(node, "size")
    _, place, size = _sized(node, sizes, places)
    return InParts(place, {size: places[size]})


def filled_anew(node: fx.Node, places: Places, parts: int) -> InParts:
    """Make a value of equal elements with the type of a chunk; with known sizes it is whole."""
    source = source_of(node)
    if source not in places:
        return filled(node, places, parts)
    if all(isinstance(size, int) for size in extents(node)):
        return InParts(SUM, {source: places[source]}, once=True)
    _, place, size = _sized(node, argument(node, "size"), places)
    return InParts(place, {source: places[source], size: places[size]})


def _sized(node: fx.Node, sizes: object, places: Places) -> tuple[int, Routed, fx.Node]:
    """Return the dimension whose size is the number of a part's rows, how the result lies, and
    the size.
    """
    assert isinstance(sizes, (list, tuple))
    found = [(dim, size) for dim, size in enumerate(sizes) if size in places]
    if len(found) != 1:
        raise EndsError("several of its sizes are those of a part")
    ((dim, size),) = found
    place = places[size]
    if not isinstance(place, Addends) or place.total is None:
        raise EndsError("one of its sizes is a count, and not the number of all rows")
    return dim, Routed(dim, Alike(place.total), by=place.keys), size


def permute_rows(node: fx.Node, places: Places, parts: int) -> InParts:
    """Follow the rows to their new place."""
    source = source_of(node)
    place = lying(source, places.get(source))
    order = order_of(node, len(extents(source)))
    return InParts(place.at(order.index(place.dim)), {source: places[source]})


def unsqueeze_rows(node: fx.Node, places: Places, parts: int) -> InParts:
    """Count the dimension that is put in front."""
    source = source_of(node)
    place = lying(source, places.get(source))
    (at,) = dims_of(node, len(extents(source)) + 1)
    return InParts(place.moved(at <= place.dim), {source: places[source]})


def squeeze_rows(node: fx.Node, places: Places, parts: int) -> InParts:
    """Count the dimensions that go."""
    source = source_of(node)
    place, shape = lying(source, places.get(source)), extents(source)
    gone = {dim for dim in dims_of(node, len(shape)) if shape[dim] == 1}
    made = place.moved(-sum(dim < place.dim for dim in gone))
    return InParts(made, {source: places[source]})


def _apart(node: fx.Node, place: Routed, dims: list[int]) -> None:
    if place.dim in dims:
        raise EndsError("it mixes rows, and those of other parts belong to them")


def piece_of_rows(node: fx.Node, places: Places, parts: int) -> InParts:
    """Take a piece along another dimension, or all of the rows."""
    source = source_of(node)
    place = lying(source, places.get(source))
    (at,) = dims_of(node, len(extents(source)), default=0)
    start, end, step = (argument(node, name) for name in ("start", "end", "step"))
    is_all = node.target is aten.slice.Tensor and start in (None, 0) and step in (None, 1)
    if not is_all or not (end is None or (isinstance(end, int) and end >= 2**62)):
        _apart(node, place, [at])
    less = node.target is aten.select.int and at < place.dim
    return InParts(place.moved(-less), {source: places[source]})


def along_rows(node: fx.Node, places: Places, parts: int) -> InParts:
    """Work along another dimension: sort, pick, accumulate or normalize there."""
    source = source_of(node)
    place = lying(source, places.get(source))
    if place.points is not None or len(places) > 1:
        raise EndsError("it computes with places of rows, or with other values")
    _apart(node, place, dims_of(node, len(extents(source)), default=-1))
    several = node.meta.get("val")
    made = (place,) * len(several) if isinstance(several, (list, tuple)) else place
    return InParts(made, {source: places[source]})


def reduce_rows(node: fx.Node, places: Places, parts: int) -> InParts:
    """Count the dimensions that go; over rows, a sum is that of the sums of parts."""
    source = source_of(node)
    place = lying(source, places.get(source))
    if place.points is not None:
        raise EndsError("it computes with places of rows")
    rank = len(extents(source))
    dims = dims_of(node, rank, default=list(range(rank))) or list(range(rank))
    reads: dict[fx.Node, Place] = {source: places[source]}
    if place.dim not in dims:
        gone = 0 if argument(node, "keepdim") else sum(dim < place.dim for dim in set(dims))
        several, made = node.meta.get("val"), place.moved(-gone)
        return InParts(
            (made,) * len(several) if isinstance(several, (list, tuple)) else made, reads
        )
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


def cat_rows(node: fx.Node, places: Places, parts: int) -> InParts:
    """Join along another dimension."""
    joined = node.args[0]
    assert isinstance(joined, (list, tuple))
    (at,) = dims_of(node, len(extents(node)), default=0)
    if len(set(joined) - set(places)) > 0:
        raise EndsError("it joins whole values to rows in an order that parts do not share")
    found = [lying(source, places[source]) for source in joined if isinstance(source, fx.Node)]
    rows = agreed(place.rows for place in found)
    dims = {place.dim for place in found}
    if len(dims) != 1 or at in dims or any(place.points is not None for place in found):
        raise EndsError("it joins rows of parts behind each other")
    made = Routed(dims.pop(), rows, by=found[0].keys)
    return InParts(settled(node, made), dict(places))


def product_of_rows(node: fx.Node, places: Places, parts: int) -> InParts:
    """Keep rows, or columns, apart; along rows, the product is the sum of those of the parts."""
    a, b = node.args[-2:]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    rank = len(extents(node))
    bias = node.args[0] if len(node.args) > 2 else None
    if bias in places or rank != 2:
        raise EndsError("its bias, or a batch of products, lies in parts")
    left = lying(a, places[a]) if a in places else None
    right = lying(b, places[b]) if b in places else None
    if any(place is not None and place.points is not None for place in (left, right)):
        raise EndsError("it computes with places of rows")
    if left is not None and right is not None:
        if (left.dim, right.dim) != (1, 0):
            raise EndsError("its operands lie in unlike parts")
        agreed((left.rows, right.rows))
        if any(argument(node, name) not in (None, 1) for name in ("alpha", "beta")) or a is b:
            raise EndsError("its sum is scaled, or of one value with itself")
        return InParts(SUM, dict(places))
    place = left or right
    if place is None or place.dim != (0 if left is not None else 1):
        raise EndsError("it adds along rows, and reads a whole value beside them")
    if bias is not None:
        shape = extents(bias)
        own = place.dim + len(shape) - rank
        if own >= 0 and shape[own] != 1:
            raise EndsError("it reads a whole bias row by row")
    return InParts(settled(node, place), dict(places))


def wait_for_rows(node: fx.Node, places: Places, parts: int) -> InParts:
    """Wait for the launch of a part."""
    source = source_of(node)
    return InParts(places[source], {source: places[source]})


RULES: dict[object, Rule] = {
    torch.ops._c10d_functional.wait_tensor.default: wait_for_rows,
    **dict.fromkeys(
        (aten.view.default, aten.reshape.default, aten._unsafe_view.default), reshape_rows
    ),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), permute_rows),
    aten.unsqueeze.default: unsqueeze_rows,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), squeeze_rows),
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
