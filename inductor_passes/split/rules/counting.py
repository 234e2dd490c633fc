"""Counts of tokens: how many of a part have each expert, what ranks tell each other of that, and
the sizes made of it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
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
    Place,
    Rule,
    dims_of,
    extents,
    filled_with,
    source_of,
)
from inductor_passes.split.rules.views import reshaped

c10d = torch.ops._c10d_functional
Places = Mapping[fx.Node, Place]
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
    while node.target in _SAME or _takes_all(node):
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


def _takes_all(node: fx.Node) -> bool:
    """Return whether a slice takes everything."""
    if node.target is not aten.slice.Tensor:
        return False
    start, end, step = (argument(node, name) for name in ("start", "end", "step"))
    ends = end is None or (isinstance(end, int) and end >= 2**62)
    return start in (None, 0) and step in (None, 1) and ends


def rows_of(node: fx.Node, place: Place | None, parts: int) -> Rows:
    """Return the rows of all elements of a value, flattened to one dimension."""
    if isinstance(place, Cut):
        shape = extents(node)
        if not all(isinstance(size, int) for size in shape):
            raise EndsError("its sizes are symbols")
        size = 1
        for each in shape:
            size *= each
        return Base(size, reshaped(place, shape, (size,), parts).outer)
    ones = [size for dim, size in enumerate(extents(node)) if dim != getattr(place, "dim", -1)]
    if isinstance(place, Routed) and place.points is None and all(size == 1 for size in ones):
        return place.rows
    raise EndsError("what it counts does not lie in parts")


def _counted(node: fx.Node, places: Places, parts: int, keys: fx.Node, classes: object) -> InParts:
    made = tensor(node)
    if not isinstance(classes, int) or made is None or made.dtype not in _EXACT:
        raise EndsError("nobody knows how many kinds it counts")
    counts = KeyCounts(keys_of(keys), rows_of(keys, places.get(keys), parts), classes)
    return InParts(Addends(counts), {n: p for n, p in places.items() if not isinstance(p, tuple)})


def one_hot_sum(node: fx.Node, places: Places, parts: int) -> InParts:
    """Count by adding what is one where a key is that of a column."""
    source = source_of(node)
    rank = len(extents(source))
    found = tensor(node)
    dims = dims_of(node, rank)
    if found is None or found.dtype not in _WHOLE or sorted(dims) != list(range(rank - 1)):
        raise EndsError("it counts no keys")
    if argument(node, "keepdim"):
        raise EndsError("it counts no keys")
    at: Any = source
    while at.target in (prims.convert_element_type.default, aten._to_copy.default):
        at = at.args[0]
    if at.target is not aten.eq.Tensor:
        raise EndsError("it counts no keys")
    compared, classes = at.args
    if not _is_range(classes) or not isinstance(compared, fx.Node):
        raise EndsError("it counts no keys")
    if extents(compared)[-1] != 1 or len(extents(compared)) != rank:
        raise EndsError("it counts no keys")
    # Rows are those of the keys, whose last dimension is the one that is compared.
    place = places.get(source)
    keys = compared.args[0] if compared.target is aten.unsqueeze.default else compared
    assert isinstance(keys, fx.Node)
    size = extents(classes)[0]
    if not isinstance(place, (Cut, Routed)) or not isinstance(size, int):
        raise EndsError("it counts no keys")
    counts = KeyCounts(keys_of(keys), rows_of(compared, place, parts), size)
    return InParts(Addends(counts), {source: place})


def _is_range(node: object) -> bool:
    if not isinstance(node, fx.Node) or len(extents(node)) != 1:
        return False
    if node.target is aten.arange.default:
        return True
    start, step = argument(node, "start"), argument(node, "step")
    return node.target is prims.iota.default and (start, step) == (0, 1)


def added_ones(node: fx.Node, places: Places, parts: int) -> InParts:
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
    step = _counted(node, places, parts, keys, extents(into)[0])
    place, reads = places.get(keys), dict(step.reads)
    if ones not in places and extents(ones) not in ((), (1,)):
        if not isinstance(place, Cut):
            raise EndsError("it adds a whole value row by row")
        reads[ones] = place
    return InParts(step.out, reads)


def histogram(node: fx.Node, places: Places, parts: int) -> InParts:
    """Count numbers from 0 on, each in a bin of its own."""
    keys, bins = source_of(node), argument(node, "bins")
    # ``histc`` spreads its bins over [min, max]: one bin for each whole number only from 0 to the
    # number of bins.
    if argument(node, "min") != 0 or argument(node, "max") != bins:
        raise EndsError("its bins are not one for each key")
    return _counted(node, places, parts, keys, bins)


# What counts: tried where nothing else is known of it either.
COUNTING: dict[object, Rule] = {
    aten.sum.dim_IntList: one_hot_sum,
    aten.histc.default: histogram,
    **dict.fromkeys(
        (aten.scatter_add.default, aten.index_put.default, aten.index_add.default), added_ones
    ),
}


def _addends(node: fx.Node, places: Places) -> dict[fx.Node, Addends]:
    """Return the addends that it reads, which have to be all values that it reads."""
    found = {n: p for n in node.all_input_nodes if isinstance(p := places.get(n), Addends)}
    # A count of a chunk and a value of the whole in one operator: neither its sum nor its join
    # would be right.
    if len(found) < len(node.all_input_nodes):
        raise EndsError("it reads the sum over all parts beside other values")
    return found


def _keys(found: Iterable[Addends]) -> fx.Node | None:
    return next((place.keys for place in found if place.keys is not None), None)


def kept(node: fx.Node, places: Places, parts: int) -> InParts:
    """Count on, in another shape or type."""
    ((source, place),) = _addends(node, places).items()
    made = tensor(node)
    if made is None or made.dtype not in _EXACT:
        raise EndsError("it takes counts for something else")
    return InParts(place, {source: place})


def linear(node: fx.Node, places: Places, parts: int) -> InParts:
    """Add or place counts: of sums the sum."""
    if argument(node, "alpha") not in (None, 1):
        raise EndsError("its sum is scaled")
    found = _addends(node, places)
    return InParts(Addends(by=_keys(found.values())), found)


def summed(node: fx.Node, places: Places, parts: int) -> InParts:
    """Add counts; those of equal runs of keys are counts again."""
    ((source, place),) = _addends(node, places).items()
    shape = extents(source)
    dims = sorted(set(dims_of(node, len(shape), default=list(range(len(shape))))))
    counts = place.counts
    if counts is not None:
        groups = counts.groups
        for dim in dims:
            groups //= shape[dim]
        # Summed over trailing dimensions, neighbouring runs become one run: still counts of runs,
        # of fewer of them. Over the first one, runs of all ranks with one number are added.
        trailing = dims == list(range(len(shape) - len(dims), len(shape)))
        if counts.at is not None or counts.every:
            counts = None
        elif trailing:
            counts = replace(counts, groups=groups)
        elif dims == [0] and counts.group:
            counts = replace(counts, groups=groups, every=True)
        else:
            counts = None
    return InParts(Addends(counts, by=place.keys), {source: place})


def accumulated(node: fx.Node, places: Places, parts: int) -> InParts:
    """Say where runs of keys end."""
    ((source, place),) = _addends(node, places).items()
    counts = place.counts
    one = counts is not None and counts.at is None and extents(source) == (counts.groups,)
    return InParts(Addends(by=place.keys, ends=counts if one else None), {source: place})


def select_count(node: fx.Node, places: Places, parts: int) -> InParts:
    """Pick the count of one run of keys."""
    ((source, place),) = _addends(node, places).items()
    shape, index, counts = extents(source), argument(node, "index"), place.counts
    if not isinstance(index, int):
        raise EndsError("it picks by a value")
    one = counts is not None and counts.at is None and shape == (counts.groups,)
    made = replace(counts, at=(index % shape[0],)) if one and counts is not None else None
    if (ends := place.ends) is not None and shape == (ends.groups,):
        made = replace(ends, at=tuple(range(index % shape[0] + 1)))
    return InParts(Addends(made, by=place.keys), {source: place})


def each(node: fx.Node, places: Places, parts: int) -> InParts:
    """Take counts apart."""
    ((source, place),) = _addends(node, places).items()
    counts, shape = place.counts, extents(source)
    one = counts is not None and counts.at is None and shape == (counts.groups,)
    found = [
        Addends(replace(counts, at=(i,)) if one and counts is not None else None, by=place.keys)
        for i in range(len(node.meta["val"]))
    ]
    return InParts(tuple(found), {source: place})


def exchanged(node: fx.Node, places: Places, parts: int) -> InParts:
    """Tell each rank its share of the counts of a part."""
    ((source, place),) = _addends(node, places).items()
    given, taken = argument(node, "input_split_sizes"), argument(node, "output_split_sizes")
    ranks, shape, counts = group_size(node), extents(source), place.counts
    if ranks < 1 or not shape or shape[0] % ranks:
        raise EndsError("its shares of the counts are not equal ones")
    even = [shape[0] // ranks] * ranks
    if not all(isinstance(x, (list, tuple)) and list(x) in ([], even) for x in (given, taken)):
        raise EndsError("its shares of the counts are not equal ones")
    if counts is not None:
        ours = counts.at is None and not counts.group and counts.groups % ranks == 0
        counts = replace(counts, group=group_name(node)) if ours else None
    return InParts(Addends(counts, by=place.keys), {source: place})


def size(node: fx.Node, places: Places, parts: int) -> InParts:
    """Make a size of a count: a symbol of its own for each part."""
    ((source, place),) = _addends(node, places).items()
    made, found = node.meta.get("val"), tensor(source)
    if found is None or found.dtype not in _WHOLE or not isinstance(made, torch.SymInt):
        raise EndsError("it makes no size of a count")
    return InParts(replace(place, total=_number(place.counts)), {source: place})


def _number(counts: KeyCounts | None) -> Number | None:
    """Return the rows whose number is a size made of these counts; None if that is unknown."""
    if counts is None or counts.at is None:
        return None
    return counts.total or Run(counts)


def sizes_added(node: fx.Node, places: Places, parts: int) -> InParts:
    """Add sizes."""
    listed = node.args[0] if isinstance(node.args[0], (list, tuple)) else node.args
    listed = [one for one in listed if one != 0]
    if not all(isinstance(one, fx.Node) for one in listed):
        raise EndsError("it adds a number to the sum over all parts")
    found = _addends(node, places)
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


def size_of(node: fx.Node, places: Places, parts: int) -> InParts:
    """Read how many rows a part has."""
    source = source_of(node)
    place, dim = places.get(source), argument(node, "dim")
    if not isinstance(place, Routed) or dim != place.dim:
        raise EndsError("it reads a size along another dimension")
    return InParts(Addends(None, count_of(place.rows), False, place.keys), {source: place})


def condition(node: fx.Node, places: Places, parts: int) -> InParts:
    """Check for each part what was checked of the whole: that counts are none below zero, at
    most so many, or all rows.
    """
    size, other = node.args
    place = places.get(size) if isinstance(size, fx.Node) else None
    checks = all(user.target is aten._assert_scalar.default for user in node.users)
    if checks and isinstance(other, fx.Node) and isinstance(place, Addends):
        return _both(node, place, places)
    if not checks or not isinstance(size, fx.Node) or not isinstance(place, Addends):
        raise EndsError("it compares the sum over all parts")
    if not isinstance(other, int):
        raise EndsError("it compares the sum over all parts")
    if place.counts is None and place.total is None:
        raise EndsError("it compares the sum over all parts")
    args: tuple[Any, ...] = node.args
    if node.target is operator.eq:
        if place.total is None or not isinstance(place.total, Base) or place.total.size != other:
            raise EndsError("it compares the sum over all parts")
        args = (size, other // parts)
    elif (node.target is operator.ge and other > 0) or (node.target is operator.gt and other >= 0):
        raise EndsError("it compares the sum over all parts")
    return InParts(Condition(), {size: place}, args)


def _both(node: fx.Node, place: Addends, places: Places) -> InParts:
    """Check for each part that two sizes are one number of rows, or that one counts some of
    those of the other.
    """
    size, other = node.args
    assert isinstance(size, fx.Node) and isinstance(other, fx.Node)
    their = places.get(other)
    if isinstance(their, Addends):
        same = place.total is not None and place.total == their.total
        few, all_ = (their, place) if node.target is operator.ge else (place, their)
        some = few.counts is not None and count_of(few.counts.rows) == all_.total
        if same if node.target is operator.eq else some and node.target in _AT_MOST:
            return InParts(Condition(), {size: place, other: their})
    raise EndsError("it compares the sum over all parts")


_AT_MOST = (operator.ge, operator.le)


def asserted(node: fx.Node, places: Places, parts: int) -> InParts:
    """Check a condition of each part."""
    source = source_of(node)
    place = places.get(source)
    if not isinstance(place, Condition):
        raise EndsError("its condition is on the sum over all parts")
    return InParts(Condition(), {source: place}, (source, f"Of a part: {node.args[1]}"))


def constrained(node: fx.Node, places: Places, parts: int) -> InParts:
    """Bound the sizes of each part."""
    source = source_of(node)
    place, least = places.get(source), argument(node, "min")
    if not isinstance(place, Addends) or place.counts is None or (least not in (None, 0)):
        raise EndsError("its bounds are of the sum over all parts")
    return InParts(Condition(), {source: place})


def sizes_in_order(listed: object, shares: int, places: Places) -> KeyCounts | None:
    """Return what the sizes count, if they are those of all runs in order, in equal shares."""
    if not isinstance(listed, (list, tuple)) or len(listed) != shares or not shares:
        return None
    found: KeyCounts | None = None
    for i, size in enumerate(listed):
        place = places.get(size) if isinstance(size, fx.Node) else None
        counts = place.counts if isinstance(place, Addends) else None
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
