"""Counts of tokens: how many of a part have each expert, what ranks tell each other of that, and
the sizes made of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from inductor_passes.graph.collectives import argument, group_name, group_size
from inductor_passes.graph.edit import aten, prims, tensor
from inductor_passes.split.rules.rows import (
    Addends,
    Base,
    Condition,
    KeyCounts,
    Number,
    Routed,
    Rows,
    Run,
    count_of,
)
from inductor_passes.split.rules.rule import (
    Cut,
    EndsError,
    InParts,
    Layout,
    Layouts,
    Rule,
    dims_of,
    extents,
    filled_with,
    source_of,
)
from inductor_passes.split.rules.views import reshaped

c10d = torch.ops._c10d_functional
_WHOLE = (torch.int16, torch.int32, torch.int64)
_EXACT = (*_WHOLE, torch.float32, torch.float64)
# Keep the keys, and their order, if not their shape.
_SAME = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten._to_copy.default,
    prims.convert_element_type.default,
)


def keys_of(node: fx.Node) -> fx.Node:
    """Return the value that holds the keys first, before views and casts."""
    while node.target in _SAME or takes_all(node):
        source = node.args[0]
        made, given = tensor(node), tensor(source)
        # A cast that rounds could make two keys equal: behind it they are other keys.
        if made is None or given is None or made.dtype not in _EXACT:
            break
        if given.dtype not in _WHOLE and given.dtype != made.dtype:
            break
        assert isinstance(source, fx.Node)
        node = source
    return node


def takes_all(node: fx.Node) -> bool:
    """Return whether a slice takes everything."""
    if node.target is not aten.slice.Tensor:
        return False
    start, end, step = (argument(node, name) for name in ("start", "end", "step"))
    ends = end is None or (isinstance(end, int) and end >= 2**62)
    return start in (None, 0) and step in (None, 1) and ends


def rows_of(node: fx.Node, layout: Layout | None, parts: int) -> Rows:
    """Return the rows of all elements of a value, flattened to one dimension."""
    if isinstance(layout, Cut):
        shape = extents(node)
        if not all(isinstance(size, int) for size in shape):
            raise EndsError("its sizes are symbols")
        size = 1
        for each in shape:
            size *= each
        return Base(size, reshaped(layout, shape, (size,), parts).outer)
    own = layout.dim if isinstance(layout, Routed) else -1
    ones = [size for dim, size in enumerate(extents(node)) if dim != own]
    if isinstance(layout, Routed) and layout.points is None and all(size == 1 for size in ones):
        return layout.rows
    raise EndsError("what it counts does not lie in parts")


def _counted(
    node: fx.Node, layouts: Layouts, parts: int, keys: fx.Node, classes: object
) -> InParts:
    made = tensor(node)
    if not isinstance(classes, int) or made is None or made.dtype not in _EXACT:
        raise EndsError("nobody knows how many kinds it counts")
    counts = KeyCounts(keys_of(keys), rows_of(keys, layouts.get(keys), parts), classes)
    return InParts(Addends(counts), {n: p for n, p in layouts.items() if not isinstance(p, tuple)})


def one_hot_sum(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Count by adding what is one where a key is that of a column."""
    source = source_of(node)
    rank = len(extents(source))
    found = tensor(node)
    dims = dims_of(node, rank)
    keeps_dims = argument(node, "keepdim") or sorted(dims) != list(range(rank - 1))
    if keeps_dims or found is None or found.dtype not in _WHOLE:
        raise EndsError("it counts no keys")
    at: Any = source
    while at.target in (prims.convert_element_type.default, aten._to_copy.default):
        at = at.args[0]
    if at.target is not aten.eq.Tensor:
        raise EndsError("it counts no keys")
    compared, classes = at.args
    is_one_hot = _is_range(classes) and isinstance(compared, fx.Node)
    if not is_one_hot or extents(compared)[-1] != 1 or len(extents(compared)) != rank:
        raise EndsError("it counts no keys")
    # Rows are those of the keys, whose last dimension is the one that is compared.
    layout = layouts.get(source)
    keys = compared.args[0] if compared.target is aten.unsqueeze.default else compared
    assert isinstance(keys, fx.Node)
    size = extents(classes)[0]
    if not isinstance(layout, (Cut, Routed)) or not isinstance(size, int):
        raise EndsError("it counts no keys")
    counts = KeyCounts(keys_of(keys), rows_of(compared, layout, parts), size)
    return InParts(Addends(counts), {source: layout})


def _is_range(node: object) -> bool:
    if not isinstance(node, fx.Node) or len(extents(node)) != 1:
        return False
    if node.target is aten.arange.default:
        return True
    start, step = argument(node, "start"), argument(node, "step")
    return node.target is prims.iota.default and (start, step) == (0, 1)


def added_ones(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Count by adding a one at the place of each key to zeros."""
    into = source_of(node)
    if node.target is aten.index_put.default:
        indices, ones = argument(node, "indices"), argument(node, "values")
        assert isinstance(indices, (list, tuple))
        keys, adds = indices[0], argument(node, "accumulate")
        adds = adds and len(indices) == 1
    else:
        keys, ones, adds = argument(node, "index"), node.args[3], True
        adds = argument(node, "alpha") in (None, 1)
    # Anything but ones added to zeros is a weighted sum, of which no exchange may take its sizes.
    if not adds or len(extents(into)) != 1 or filled_with(into) != 0 or filled_with(ones) != 1:
        raise EndsError("it counts no keys")
    assert isinstance(keys, fx.Node) and isinstance(ones, fx.Node)
    step = _counted(node, layouts, parts, keys, extents(into)[0])
    layout, reads = layouts.get(keys), dict(step.reads)
    if ones not in layouts and extents(ones) not in ((), (1,)):
        if not isinstance(layout, Cut):
            raise EndsError("it adds a whole value row by row")
        reads[ones] = layout
    return InParts(step.out, reads)


def histogram(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Count numbers from 0 on, each in a bin of its own."""
    keys, bins = source_of(node), argument(node, "bins")
    # ``histc`` spreads its bins over [min, max]: one bin for each whole number only from 0 to the
    # number of bins.
    if argument(node, "min") != 0 or argument(node, "max") != bins:
        raise EndsError("its bins are not one for each key")
    return _counted(node, layouts, parts, keys, bins)


# What counts: tried where nothing else is known of it either.
COUNTING: dict[object, Rule] = {
    aten.sum.dim_IntList: one_hot_sum,
    aten.histc.default: histogram,
    **dict.fromkeys(
        (aten.scatter_add.default, aten.index_put.default, aten.index_add.default), added_ones
    ),
}


def _addends(node: fx.Node, layouts: Layouts) -> dict[fx.Node, Addends]:
    """Return the addends that it reads, which have to be all values that it reads."""
    found = {n: p for n in node.all_input_nodes if isinstance(p := layouts.get(n), Addends)}
    # A count of a chunk and a value of the whole in one operator: neither its sum nor its join
    # would be right.
    if len(found) < len(node.all_input_nodes):
        raise EndsError("it reads the sum over all parts beside other values")
    return found


def _addend(node: fx.Node, layouts: Layouts) -> tuple[fx.Node, Addends]:
    """Return the one value that it reads, which has to be addends."""
    (found,) = _addends(node, layouts).items()
    return found


def _keys(found: Iterable[Addends]) -> fx.Node | None:
    return next((layout.keys for layout in found if layout.keys is not None), None)


def kept(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Count on, in another shape or type."""
    source, layout = _addend(node, layouts)
    made = tensor(node)
    if made is None or made.dtype not in _EXACT:
        raise EndsError("it takes counts for something else")
    return InParts(layout, {source: layout})


def linear(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Add or place counts: of sums the sum."""
    if argument(node, "alpha") not in (None, 1):
        raise EndsError("its sum is scaled")
    found = _addends(node, layouts)
    return InParts(Addends(by=_keys(found.values())), found)


def summed(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Add counts; those of equal runs of keys are counts again."""
    source, layout = _addend(node, layouts)
    shape = extents(source)
    dims = sorted(set(dims_of(node, len(shape), default=list(range(len(shape))))))
    counts = layout.counts
    if counts is not None:
        groups = counts.groups
        for dim in dims:
            groups //= shape[dim]
        # Summed over trailing dimensions, neighbouring runs become one run: still counts of runs,
        # of fewer of them. Over the first one, runs of all ranks with one number are added.
        trailing = dims == list(range(len(shape) - len(dims), len(shape)))
        every = not trailing and dims == [0] and bool(counts.group)
        known = counts.at is None and not counts.every and (trailing or every)
        counts = replace(counts, groups=groups, every=every) if known else None
    return InParts(Addends(counts, by=layout.keys), {source: layout})


def accumulated(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Say where runs of keys end."""
    source, layout = _addend(node, layouts)
    counts = layout.counts
    one = counts is not None and counts.has_shape(extents(source))
    return InParts(Addends(by=layout.keys, ends=counts if one else None), {source: layout})


def select_count(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Pick the count of one run of keys."""
    source, layout = _addend(node, layouts)
    shape, index, counts = extents(source), argument(node, "index"), layout.counts
    if not isinstance(index, int):
        raise EndsError("it picks by a value")
    made = None
    if counts is not None and counts.has_shape(shape):
        made = replace(counts, at=(index % shape[0],))
    if (ends := layout.ends) is not None and shape == (ends.groups,):
        made = replace(ends, at=tuple(range(index % shape[0] + 1)))
    return InParts(Addends(made, by=layout.keys), {source: layout})


def each(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Take counts apart."""
    source, layout = _addend(node, layouts)
    counts = layout.counts
    if counts is not None and not counts.has_shape(extents(source)):
        counts = None
    found = (
        Addends(counts and replace(counts, at=(i,)), by=layout.keys)
        for i in range(len(node.meta["val"]))
    )
    return InParts(tuple(found), {source: layout})


def exchanged(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Tell each rank its share of the counts of a part."""
    source, layout = _addend(node, layouts)
    given, taken = argument(node, "input_split_sizes"), argument(node, "output_split_sizes")
    ranks, shape, counts = group_size(node), extents(source), layout.counts
    if ranks < 1 or not shape or shape[0] % ranks:
        raise EndsError("its shares of the counts are not equal ones")
    even = [shape[0] // ranks] * ranks
    if not all(isinstance(x, (list, tuple)) and list(x) in ([], even) for x in (given, taken)):
        raise EndsError("its shares of the counts are not equal ones")
    if counts is not None:
        ours = counts.at is None and not counts.group and counts.groups % ranks == 0
        counts = replace(counts, group=group_name(node)) if ours else None
    return InParts(Addends(counts, by=layout.keys), {source: layout})


def size(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Make a size of a count: a symbol of its own for each part."""
    source, layout = _addend(node, layouts)
    made, found = node.meta.get("val"), tensor(source)
    if found is None or found.dtype not in _WHOLE or not isinstance(made, torch.SymInt):
        raise EndsError("it makes no size of a count")
    return InParts(replace(layout, total=_number(layout.counts)), {source: layout})


def _number(counts: KeyCounts | None) -> Number | None:
    """Return the rows whose number is a size made of these counts; None if that is unknown."""
    if counts is None or counts.at is None:
        return None
    return counts.total or Run(counts)


def sizes_added(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Add sizes."""
    listed = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args
    listed = [one for one in listed if one != 0]
    if not all(isinstance(one, fx.Node) for one in listed):
        raise EndsError("it adds a number to the sum over all parts")
    found = _addends(node, layouts)
    several = [found[one].counts for one in listed if isinstance(one, fx.Node)]
    first, counts = several[0], None
    at: list[int] = []
    if first is not None and first.at is not None:
        for one in several:
            if one is None or one.at is None or replace(one, at=first.at) != first:
                break
            at += one.at
        else:
            counts = replace(first, at=tuple(at)) if len(set(at)) == len(at) else None
    keys = _keys(found.values())
    return InParts(
        Addends(counts, _number(counts), all(p.joins for p in found.values()), keys), found
    )


def size_of(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Read how many rows a part has."""
    source = source_of(node)
    layout, dim = layouts.get(source), argument(node, "dim")
    if not isinstance(layout, Routed) or dim != layout.dim:
        raise EndsError("it reads a size along another dimension")
    return InParts(Addends(None, count_of(layout.rows), False, layout.keys), {source: layout})


def condition(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Check for each part what was checked of the whole: that counts are none below zero, at
    most so many, or all rows.
    """
    size, other = node.args
    layout = layouts.get(size) if isinstance(size, fx.Node) else None
    checks = all(user.target is aten._assert_scalar.default for user in node.users)
    if not checks or not isinstance(layout, Addends):
        raise EndsError("it compares the sum over all parts")
    assert isinstance(size, fx.Node)
    if isinstance(other, fx.Node):
        return _both(node, size, other, layouts)
    if not isinstance(other, int) or (layout.counts is None and layout.total is None):
        raise EndsError("it compares the sum over all parts")
    args: tuple[Any, ...] = node.args
    if node.target is operator.eq:
        if layout.total is None or not isinstance(layout.total, Base) or layout.total.size != other:
            raise EndsError("it compares the sum over all parts")
        args = (size, other // parts)
    elif (node.target is operator.ge and other > 0) or (node.target is operator.gt and other >= 0):
        raise EndsError("it compares the sum over all parts")
    return InParts(Condition(), {size: layout}, args)


def _both(node: fx.Node, size: fx.Node, other: fx.Node, layouts: Layouts) -> InParts:
    """Check for each part that two sizes are one number of rows, or that one counts some of
    those of the other.
    """
    layout, their = layouts.get(size), layouts.get(other)
    if isinstance(layout, Addends) and isinstance(their, Addends):
        same = layout.total is not None and layout.total == their.total
        few, all_ = (their, layout) if node.target is operator.ge else (layout, their)
        some = few.counts is not None and count_of(few.counts.rows) == all_.total
        if same if node.target is operator.eq else some and node.target in _AT_MOST:
            return InParts(Condition(), {size: layout, other: their})
    raise EndsError("it compares the sum over all parts")


_AT_MOST = (operator.ge, operator.le)


def asserted(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Check a condition of each part."""
    source = source_of(node)
    layout = layouts.get(source)
    if not isinstance(layout, Condition):
        raise EndsError("its condition is on the sum over all parts")
    return InParts(Condition(), {source: layout}, (source, f"Of a part: {node.args[1]}"))


def constrained(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Bound the sizes of each part."""
    source = source_of(node)
    layout, least = layouts.get(source), argument(node, "min")
    if not isinstance(layout, Addends) or layout.counts is None or (least not in (None, 0)):
        raise EndsError("its bounds are of the sum over all parts")
    return InParts(Condition(), {source: layout})


def sizes_in_order(listed: object, shares: int, layouts: Layouts) -> KeyCounts | None:
    """Return what the sizes count, if they are those of all runs in order, in equal shares."""
    if not isinstance(listed, (list, tuple)) or len(listed) != shares or not shares:
        return None
    found: KeyCounts | None = None
    for i, size in enumerate(listed):
        layout = layouts.get(size) if isinstance(size, fx.Node) else None
        counts = layout.counts if isinstance(layout, Addends) else None
        if counts is None or counts.at is None or counts.groups % shares:
            return None
        share = counts.groups // shares
        if counts.at != tuple(range(i * share, (i + 1) * share)):
            return None
        counts = replace(counts, at=None)
        if found not in (None, counts):
            return None
        found = counts
    return found


BOUNDS = (aten.sym_constrain_range.default, aten.sym_constrain_range_for_size.default)
RULES: dict[object, Rule] = {
    **dict.fromkeys(_SAME, kept),
    **dict.fromkeys((c10d.wait_tensor.default,), kept),
    **dict.fromkeys(
        (
            aten.add.Tensor,
            aten.slice.Tensor,
            aten.permute.default,
            aten.t.default,
            aten.transpose.int,
            aten.cat.default,
        ),
        linear,
    ),
    **dict.fromkeys((aten.sum.dim_IntList, aten.sum.default), summed),
    aten.cumsum.default: accumulated,
    aten.select.int: select_count,
    aten.unbind.int: each,
    c10d.all_to_all_single.default: exchanged,
    aten._local_scalar_dense.default: size,
    **dict.fromkeys((torch.sym_sum, operator.add), sizes_added),
    **dict.fromkeys((operator.ge, operator.gt, operator.le, operator.lt, operator.eq), condition),
    aten._assert_scalar.default: asserted,
    **dict.fromkeys(BOUNDS, constrained),
}
