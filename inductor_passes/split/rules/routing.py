"""Route tokens in chunks: sorted by expert, exchanged between ranks, and put back.

Rows that were sorted by keys are exchanged by part only if sizes are counts of these keys
(``counting.py``): then a part sends each rank those of its rows that the whole would have sent
there.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from inductor_passes.graph.collectives import MEMBERS, argument, group_name, group_size
from inductor_passes.graph.edit import aten
from inductor_passes.split.rules import counting, routed
from inductor_passes.split.rules.counting import keys_of, sizes_in_order
from inductor_passes.split.rules.routed import agreed, layout_of_result, rows_layout, sliced
from inductor_passes.split.rules.rows import (
    Addends,
    Alike,
    Base,
    KeyCounts,
    Routed,
    Rows,
    Sorted,
    count_of,
    keys_behind,
)
from inductor_passes.split.rules.rule import (
    SUM,
    Cut,
    EndsError,
    InParts,
    Layout,
    Layouts,
    Rule,
    constant,
    dims_of,
    extents,
    filled_with,
    looked_up_by,
    source_of,
)


def sort(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Sort the rows of each part by themselves. Of a permutation of rows that is its inverse."""
    source = source_of(node)
    if source not in layouts:
        raise EndsError("it sorts a whole value")
    layout = rows_layout(source, layouts[source])
    if layout.dim not in dims_of(node, len(extents(source)), default=-1):
        return routed.along_rows(node, layouts, parts)
    # Sorted along one of several dimensions, each row has an order of its own, and rows no longer
    # move as one.
    if len(extents(source)) != 1:
        raise EndsError("it sorts rows of several keys")
    # The second order would depend on the first: nothing here says how the two combine.
    if isinstance(layout.rows, Base) and layout.points is None and layout.by is not None:
        raise EndsError("it sorts rows that were sorted and put back")
    descending = bool(argument(node, "descending"))
    reads: dict[fx.Node, Layout] = {source: layouts[source]}
    if layout.points is not None:
        # Sorting a permutation inverts it. Indices with gaps or repeats have no inverse.
        if not layout.permutes or descending:
            raise EndsError("it sorts places of rows that are not all places")
        same = Routed(0, layout.points, layout.points, True, layout.keys)
        return InParts((same, Routed(0, layout.points, layout.rows, True, layout.keys)), reads)
    # Equal rows: which one comes first is up to the sort, and a chunk may choose otherwise than the
    # whole.
    if isinstance(layout.rows, Alike):
        raise EndsError("it sorts rows that are all alike")
    rows = Sorted(keys_of(source), layout.rows, descending, layout.labels)
    return InParts((Routed(0, rows), Routed(0, rows, layout.rows, True)), reads)


def argsort(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Say where the rows of a part come from in their order."""
    step = sort(node, layouts, parts)
    if not isinstance(step.out, tuple) or len(step.out) < 2 or step.out[1] is None:
        raise EndsError("it sorts along another dimension")
    return InParts(step.out[1], step.reads)


def _seen(table: fx.Node, at: int, points: Rows, layouts: Layouts) -> tuple[Any, Routed]:
    """Return how a part reads the rows at which places point, and what they are. Raises
    EndsError if the table has others.
    """
    if table in layouts:
        layout = rows_layout(table, layouts[table])
        if layout.dim != at:
            raise EndsError("its table lies in parts along another dimension")
        agreed((layout.rows, points))
        return layouts[table], layout
    if isinstance(points, Base) and extents(table)[at] == points.size:
        return Cut(at, points.outer), Routed(at, points)
    cut = sliced(table, at, points)
    return cut, Routed(at, points)


def _looked_up(node: fx.Node) -> tuple[fx.Node, int, fx.Node, int]:
    """Return a look-up's table, the dimension that is looked up in, by what, and how many
    dimensions that takes the place of it.
    """
    table = source_of(node)
    if node.target is aten.embedding.default:
        by, at, rank = argument(node, "indices"), 0, None
    elif node.target is aten.index.Tensor:
        at, by = looked_up_by(argument(node, "indices"), "it looks up by several tensors")
        rank = None
    else:
        (at,), by = dims_of(node, len(extents(table))), argument(node, "index")
        rank = 1 if node.target is aten.gather.default else None
    # What a mask picks depends on data: the number of rows is known only when it runs.
    if not isinstance(by, fx.Node) or by.meta["val"].dtype == torch.bool:
        raise EndsError("it looks up by a mask")
    return table, at, by, len(extents(by)) if rank is None else rank


def look_up(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Take the rows of a part, in the order that places say; or look up row by row in a table
    that is whole.
    """
    table, at, by, rank = _looked_up(node)
    picks = node.target is aten.gather.default  # elementwise along all other dimensions
    if by not in layouts:
        layout = rows_layout(table, layouts[table])
        if picks or layout.dim == at or layout.points is not None:
            raise EndsError("it looks up rows of a part by places of the whole")
        moved = layout.moved(rank - 1 if layout.dim > at else 0)
        return InParts(layout_of_result(node, moved), {table: layouts[table]})
    order = rows_layout(by, layouts[by])
    made = order if picks else order.moved(at)
    reads: dict[fx.Node, Layout] = {by: layouts[by]}
    if picks and order.dim != at:
        return _picked(node, table, order, layouts)
    if order.points is None:
        if table in layouts:
            raise EndsError("its table lies in parts, and nobody knows where it looks")
        labels = _renamed(order.labels, table) if len(extents(table)) == 1 else None
        found = replace(made.plain(), by=order.keys, labels=labels)
        return InParts(layout_of_result(node, found), reads)
    reads[table], seen = _seen(table, at, order.points, layouts)
    permutes = seen.permutes and order.permutes
    found = Routed(made.dim, order.rows, seen.points, permutes, order.keys, seen.labels)
    return InParts(layout_of_result(node, found), reads)


def _renamed(labels: KeyCounts | None, table: fx.Node) -> KeyCounts | None:
    """Return the counts that labels refer to after a table renames them; None if unknown.

    They are the same counts, or the counts over those runs that all ranks have in one place.
    """
    names = constant(table) if labels is not None and not labels.every else None
    if labels is None or names is None or len(names) != labels.groups:
        return None
    kinds = int(names.max()) + 1
    if not torch.equal(names.cpu(), torch.arange(labels.groups, dtype=names.dtype) % kinds):
        return None
    return labels if kinds == labels.groups else replace(labels, groups=kinds, every=True)


def _picked(node: fx.Node, table: fx.Node, order: Routed, layouts: Layouts) -> InParts:
    """Pick in each row."""
    if order.points is not None or table not in layouts:
        raise EndsError("it picks in a whole value, or by places of rows")
    layout = rows_layout(table, layouts[table])
    if layout.dim != order.dim or layout.points is not None:
        raise EndsError(routed.UNLIKE)
    rows = agreed((layout.rows, order.rows))
    made = Routed(order.dim, rows, by=layout.keys or order.keys)
    return InParts(layout_of_result(node, made), dict(layouts))


def _put_at(node: fx.Node) -> tuple[int, fx.Node, fx.Node, bool, bool]:
    """Return along which dimension is put, at what places, which values, whether they are added,
    and whether each element has a place.
    """
    rank = len(extents(source_of(node)))
    if node.target in (aten.index_put.default, aten._unsafe_index_put.default):
        at, by = looked_up_by(argument(node, "indices"), "it puts by several tensors")
        values, adds = argument(node, "values"), bool(argument(node, "accumulate"))
    else:
        (at,), by = dims_of(node, rank), argument(node, "index")
        values = node.args[3]
        adds = node.target in (aten.scatter_add.default, aten.index_add.default)
    if not isinstance(by, fx.Node) or not isinstance(values, fx.Node):
        raise EndsError("it puts one value")
    if by.meta["val"].dtype == torch.bool or argument(node, "alpha") not in (None, 1):
        raise EndsError("it puts where a mask says, or scales what it puts")
    single = node.target in (aten.scatter_add.default, aten.scatter.src)
    return at, by, values, adds, single


def put_back(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Put or add rows where they came from: each part puts its own back."""
    into = source_of(node)
    at, by, values, adds, single = _put_at(node)
    if by not in layouts or len(extents(by)) != (len(extents(into)) if single else 1):
        raise EndsError("it puts rows of a part at places of the whole")
    order = rows_layout(by, layouts[by])
    if order.dim != (at if single else 0):
        raise EndsError("it puts along another dimension than that of the rows")
    reads: dict[fx.Node, Layout] = {by: layouts[by]}
    if values in layouts:
        layout = rows_layout(values, layouts[values])
        if layout.dim != at or layout.points is not None:
            raise EndsError(routed.UNLIKE)
        agreed((layout.rows, order.rows))
        reads[values] = layouts[values]
    elif extents(values)[at:] and extents(values)[at] != 1:
        reads[values] = sliced(values, at, order.rows)
    elif filled_with(values) is None:
        raise EndsError("it puts a whole value at places of a part")
    if order.points is None:
        if not adds or into in layouts or node.target not in ADDING:
            raise EndsError("it puts rows of a part at places that are not its own")
        return InParts(SUM, reads)
    if not adds and not order.permutes:
        raise EndsError("a later row may be put where an earlier one was")
    reads[into], before = _seen(into, at, order.points, layouts)
    if before.points is not None:
        raise EndsError("it writes over places of rows")
    return InParts(layout_of_result(node, Routed(at, order.points, by=order.keys)), reads)


def repeat(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Say of each row which run of keys it is of: as many of each as are counted."""
    repeats, size = source_of(node), argument(node, "output_size")
    layout = layouts.get(repeats)
    counts = layout.counts if isinstance(layout, Addends) else None
    if layout is None or counts is None or counts.every or not counts.has_shape(extents(repeats)):
        raise EndsError("it repeats as often as values say that are not counts of keys")
    reads: dict[fx.Node, Layout] = {repeats: layout}
    total = layouts.get(size) if isinstance(size, fx.Node) else None
    if not isinstance(total, Addends) or total.total != count_of(counts.rows):
        raise EndsError("its size is not the number of all rows")
    assert isinstance(size, fx.Node) and isinstance(layout, Addends)
    reads[size] = total
    return InParts(Routed(0, counts.rows, by=layout.keys, labels=counts), reads)


def exchange_rows(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Send each rank those rows of a part that have its keys; or send them back."""
    if len(node.meta.get(MEMBERS, ())) > 1:
        raise EndsError("it was merged of several launches")
    source, group = source_of(node), group_name(node)
    if source not in layouts:
        raise EndsError("it exchanges a whole value by counts of a part")
    layout = rows_layout(source, layouts[source])
    if layout.dim or layout.points is not None:
        raise EndsError("it exchanges what is no row, or places of rows")
    ranks = group_size(node)
    given, taken = argument(node, "input_split_sizes"), argument(node, "output_split_sizes")
    sent, got = (sizes_in_order(listed, ranks, layouts) for listed in (given, taken))
    # Only counts of the keys that rows are sorted by tell which rows go to which rank. Other sizes
    # might cut a chunk's rows elsewhere than the whole's.
    if sent is None or got is None:
        raise EndsError("its sizes are not counts of the keys by which its rows are sorted")
    here, there = (sent, got) if got.group else (got, sent)
    same = here.keys is there.keys and here.of == there.of
    if not same or here.group or there.group != group or here.every or there.every:
        raise EndsError("what it sends and what it gets are not counts of the same keys")
    agreed((layout.rows, sent.rows))
    reads: dict[fx.Node, Layout] = {source: layouts[source]}
    reads |= {n: layouts[n] for n in node.all_input_nodes if n is not source}
    count = count_of(got.rows)
    rows = count.size // parts if isinstance(count, Base) else None
    return InParts(Routed(0, got.rows), reads, rows=rows)


ADDING = frozenset(
    (
        aten.index_put.default,
        aten._unsafe_index_put.default,
        aten.scatter_add.default,
        aten.index_add.default,
    )
)
RULES: dict[object, Rule] = {
    torch.ops._c10d_functional.all_to_all_single.default: exchange_rows,
    **dict.fromkeys((aten.sort.default, aten.sort.stable), sort),
    **dict.fromkeys((aten.argsort.default, aten.argsort.stable), argsort),
    aten.repeat_interleave.Tensor: repeat,
    aten.sym_size.int: counting.size_of,
    **dict.fromkeys(
        (
            aten.index.Tensor,
            aten.index_select.default,
            aten.embedding.default,
            aten.gather.default,
        ),
        look_up,
    ),
    **dict.fromkeys((*ADDING, aten.index_copy.default, aten.scatter.src), put_back),
}


_ROW_RULES: dict[object, Rule] = {**routed.RULES, **RULES, **routed.RULES_OF_RUNS}
SORTS = (aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable)


def step_by_token(
    node: fx.Node, layouts: Layouts, parts: int, whole: Collection[fx.Node]
) -> InParts | None:
    """Return how a node is computed that reads routed values or counts, or makes them; None: as if
    they were whole.

    ``whole``: keys that are sorted and counted whole. Raises EndsError with the reason.
    """
    special = [p for p in layouts.values() if not isinstance(p, (Cut, tuple))]
    if not special:
        return _started(node, layouts, parts, whole)
    if any(isinstance(p, Routed) for p in special):
        return _of_rows(node, layouts, parts, whole)
    found = (counting.RULES.get(node.target), _ROW_RULES.get(node.target))
    reason = "it reads what all parts count together, a number of the whole batch"
    for rule in found:
        try:
            if rule is not None:
                return rule(node, layouts, parts)
        except EndsError as error:
            reason = str(error)
    if any(isinstance(layout, Cut) for layout in layouts.values()):
        return None
    raise EndsError(reason)


def _of_rows(node: fx.Node, layouts: Layouts, parts: int, whole: Collection[fx.Node]) -> InParts:
    # Counting first: the same operators, on keys, also add or scatter rows.
    if (counted := _counted(node, layouts, parts, whole)) is not None:
        return counted
    rule = _ROW_RULES.get(node.target) or routed.rule_of_rows(node.target)
    return rule(node, layouts, parts)


def _started(
    node: fx.Node, layouts: Layouts, parts: int, whole: Collection[fx.Node]
) -> InParts | None:
    """Sort or count what lies in ordinary parts."""
    if node.target in SORTS:
        source = source_of(node)
        layout = layouts.get(source)
        if isinstance(layout, Cut) and len(extents(source)) == 1 and keys_of(source) not in whole:
            return _ROW_RULES[node.target](node, layouts, parts)
        return None
    return _counted(node, layouts, parts, whole)


def _counted(
    node: fx.Node, layouts: Layouts, parts: int, whole: Collection[fx.Node]
) -> InParts | None:
    rule = counting.COUNTING.get(node.target)
    if rule is None:
        return None
    try:
        step = rule(node, layouts, parts)
    except EndsError:
        return None
    counts = step.out.counts if isinstance(step.out, Addends) else None
    if counts is None or counts.keys in whole or keys_behind(counts.rows) in whole:
        return None
    return step
