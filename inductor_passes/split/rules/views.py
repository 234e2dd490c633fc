"""Views and placements: a part of the result is the view of a part."""

from __future__ import annotations

import math
import operator
from typing import Any

from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import aten, permutation
from inductor_passes.split.rules.rule import (
    Cut,
    EndsError,
    InParts,
    Layouts,
    Rule,
    Shape,
    SizeOf,
    cut_of,
    dims_of,
    extents,
    has_equal,
    is_broadcast,
    known,
    lies_of,
    quotient,
    shape_of,
    sizes,
    smaller,
    source_of,
    volume,
)
from inductor_passes.torch_compat.nodes import surely_equal


def reshape(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Find the dimension in which parts lie at the same flat distance as before, which no view
    changes.
    """
    source, cut = cut_of(node, layouts)
    before, after = shape_of(source), shape_of(node)
    if known(before) and known(after) and has_equal(cut, before, parts):
        made = reshaped(cut, sizes(source), sizes(node), parts)
        return InParts(made, {source: cut}, (source, smaller(after, made.dim, parts)))
    made = _rows_kept(cut, before, after)

    def args(size_of: SizeOf) -> tuple[Any, ...]:
        return source, _given(
            node, after, made.dim, size_of(source, cut.dim, cut.outer, made.outer)
        )

    return InParts(made, {source: cut}, args)


def _rows_kept(cut: Cut, before: Shape, after: Shape) -> Cut:
    """Return how parts, which may be unequal, lie in a view that takes no row of theirs apart
    and puts none together.
    """
    rows, row = quotient(before[cut.dim], cut.outer), volume(before[cut.dim + 1 :])
    for dim in range(len(after)):
        outer = None if rows is None else quotient(after[dim], rows)
        # Unequal chunks have no common flat distance: only a dimension that keeps their rows whole,
        # with as many elements behind it, can hold them.
        if isinstance(outer, int) and surely_equal(volume(after[dim + 1 :]), row):
            return Cut(dim, outer)
    raise EndsError(f"no dimension of {list(after)} holds the rows of {list(before)} ({cut})")


def _given(node: fx.Node, shape: Shape, dim: int, size: object) -> list[Any]:
    """The shape that a view is given, with another size where the parts lie."""
    given = argument(node, "size" if argument(node, "size") is not None else "shape")
    assert isinstance(given, (list, tuple))
    made = [
        size if isinstance(size, int) else given_size
        for size, given_size in zip(shape, given, strict=True)
    ]
    made[dim] = size
    return made


def reshaped(cut: Cut, before: tuple[int, ...], after: tuple[int, ...], parts: int) -> Cut:
    """Return how equal parts lie in a view of what lies in ``cut``."""
    # Elements between the first of a chunk and the first of the next: a view changes shapes, but
    # not this number.
    distance = before[cut.dim] // cut.outer // parts * math.prod(before[cut.dim + 1 :])
    below = 1
    for dim in reversed(range(len(after))):
        row = below * after[dim]
        # This dimension has room for whole blocks of all chunks, and the distance is a multiple of
        # what lies below it: chunks then start at whole indices of it.
        if after[dim] > 1 and distance % below == 0 and row % (distance * parts) == 0:
            return Cut(dim, row // (distance * parts))
        below = row
    raise EndsError(f"no dimension of {list(after)} holds the parts of {list(before)} ({cut})")


def permute(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Follow the dimension to its new place."""
    source, layout = lies_of(node, layouts)
    order = permutation(node, len(extents(source)))
    return InParts(layout.at(order.index(layout.dim)), {source: layout})


def unsqueeze(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Count the dimension that is put in front."""
    source, layout = lies_of(node, layouts)
    (at,) = dims_of(node, len(extents(source)) + 1)
    return InParts(layout.moved(at <= layout.dim), {source: layout})


def squeeze(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Count the dimensions that go."""
    source, layout = lies_of(node, layouts)
    shape = extents(source)
    gone = {dim for dim in dims_of(node, len(shape)) if is_broadcast(shape[dim])}
    return InParts(layout.moved(-sum(dim < layout.dim for dim in gone)), {source: layout})


def expand(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Align dimensions from the right."""
    source, cut = cut_of(node, layouts)
    shape = shape_of(node)
    made = cut.moved(len(shape) - len(shape_of(source)))

    def args(size_of: SizeOf) -> tuple[Any, ...]:
        new = _given(node, shape, made.dim, size_of(source, cut.dim))
        return source, new, *node.args[2:]

    return InParts(made, {source: cut}, args)


def along_another(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Take a piece along a dimension in which the parts do not lie."""
    source, cut = cut_of(node, layouts)
    (at,) = dims_of(node, len(shape_of(source)), default=0)
    if at == cut.dim:
        raise EndsError(f"it takes a piece along the dimension of the parts ({cut})")
    return InParts(cut.moved(-(node.target is aten.select.int and at < cut.dim)), {source: cut})


def pad(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Pad dimensions in which the parts do not lie."""
    source, cut = cut_of(node, layouts)
    rank, padding = len(shape_of(source)), argument(node, "pad")
    # ``pad`` lists pairs from the last dimension on. Padding along the cut would put rows between
    # two chunks.
    if not isinstance(padding, (list, tuple)) or rank - 1 - cut.dim < len(padding) // 2:
        raise EndsError(f"it pads the dimension of the parts ({cut})")
    return InParts(cut, {source: cut})


def put(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Put a piece into a value, along a dimension in which the parts do not lie."""
    into, piece = node.args[:2]
    assert isinstance(into, fx.Node) and isinstance(piece, fx.Node)
    (at,) = dims_of(node, len(shape_of(into)), default=0)
    less = node.target is aten.select_scatter.default
    cut = layouts.get(into)
    if not isinstance(cut, Cut):
        inner = layouts[piece]
        assert isinstance(inner, Cut)
        cut = inner.moved(less and at <= inner.dim)
    if at == cut.dim:
        raise EndsError(f"it puts a piece along the dimension of the parts ({cut})")
    return InParts(cut, {into: cut, piece: cut.moved(-(less and at < cut.dim))})


def split(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Split along another dimension, or into blocks that each hold a piece of every chunk."""
    source, cut = cut_of(node, layouts)
    (at,) = dims_of(node, len(shape_of(source)), default=0)
    count = len(node.meta["val"])
    if at != cut.dim:
        return InParts((cut,) * count, {source: cut})
    whole, made = shape_of(source)[at], (Cut(at, cut.outer // count),) * count
    equal = all(surely_equal(each.shape[at] * count, whole) for each in node.meta["val"])
    # A split along the cut works only where each piece has a part of every chunk, as of a gathered
    # value that is split by rank.
    if not equal or cut.outer % count:
        raise EndsError(f"its pieces are not those of which each holds all parts ({cut})")

    def args(size_of: SizeOf) -> tuple[Any, ...]:
        piece = size_of(source, at, count)
        listed = isinstance(node.args[1], (list, tuple))
        return source, [piece] * count if listed else piece, *node.args[2:]

    return InParts(made, {source: cut}, args)


def pick(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Pick one of several results."""
    source, index = source_of(node), node.args[1]
    found = layouts.get(source)
    cut = found[index] if isinstance(found, tuple) and isinstance(index, int) else None
    if cut is None:
        raise EndsError("this result of several is not in parts")
    return InParts(cut, {source: cut})


def cat(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Join along another dimension, or join pieces of equal size.

    Each such piece becomes a block that holds a piece of every chunk.
    """
    joined = node.args[0]
    assert isinstance(joined, (list, tuple))
    sources = [source for source in joined if isinstance(source, fx.Node)]
    (at,) = dims_of(node, len(shape_of(node)), default=0)
    cuts = {layouts.get(source) for source in sources} - {None}
    # An old ``cat`` accepts empty tensors of one dimension among others, whose dimensions cannot be
    # compared.
    if len(cuts) != 1 or len({len(shape_of(source)) for source in sources}) > 1:
        raise EndsError("what it joins lies in unlike parts")
    (cut,) = cuts
    assert isinstance(cut, Cut)
    reads = dict.fromkeys(sources, cut)
    if at != cut.dim:
        return InParts(cut, reads)
    first = shape_of(sources[0])[at]
    # [outer, parts, rows] needs one number of rows for all blocks.
    if not all(surely_equal(shape_of(source)[at], first) for source in sources):
        raise EndsError("it joins pieces of unlike sizes along the dimension of the parts")
    return InParts(Cut(at, cut.outer * len(sources)), reads)


RULES: dict[object, Rule] = {
    **dict.fromkeys((aten.view.default, aten.reshape.default, aten._unsafe_view.default), reshape),
    **dict.fromkeys((aten.permute.default, aten.transpose.int, aten.t.default), permute),
    aten.unsqueeze.default: unsqueeze,
    aten.squeeze.dim: squeeze,
    aten.squeeze.dims: squeeze,
    aten.expand.default: expand,
    aten.slice.Tensor: along_another,
    aten.select.int: along_another,
    aten.constant_pad_nd.default: pad,
    aten.slice_scatter.default: put,
    aten.select_scatter.default: put,
    aten.split.Tensor: split,
    aten.split_with_sizes.default: split,
    operator.getitem: pick,
    aten.cat.default: cat,
}
