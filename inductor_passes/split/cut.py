"""Write a region into its graph: each node of it becomes one a part, and what reads all of it
reads the parts joined.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import fx

from inductor_passes.graph.aliasing import is_view
from inductor_passes.graph.collectives import MEMBERS, expect_even_exchanges, is_launch, part_of
from inductor_passes.graph.edit import Values, aten, emit
from inductor_passes.rewrite.inner_dimensions import CONTIGUOUS
from inductor_passes.split.region import Positions, Region
from inductor_passes.split.rules import ADDING
from inductor_passes.split.rules.counting import BOUNDS
from inductor_passes.split.rules.rows import Addends
from inductor_passes.split.rules.rule import (
    SUM,
    Cut,
    InParts,
    Place,
    has_equal,
    is_broadcast,
    known,
    shape_of,
    smaller,
)
from inductor_passes.torch_compat.aot import mode_of
from inductor_passes.torch_compat.nodes import hold, new_symbols, size_hint, surely_equal

# A size of a chunk: a number, or a node that makes what is a symbol.
ChunkSize = int | fx.Node

_MAKE_SYMBOLS = (aten._local_scalar_dense.default, aten.slice.Tensor)
_VIEWS = (aten.view.default, aten._unsafe_view.default)


class Cutter:
    """Rewrites one graph, in place. ``made``: the launches of each launch's parts, in order."""

    def __init__(self, graph: fx.Graph, region: Region, values: Values | None = None) -> None:
        """``values``: fake values that were worked out for cuts of the same graph."""
        self._graph, self._region, self._count = graph, region, region.parts
        self._launches = region.launches
        self._values = Values() if values is None else values
        self._parts: dict[fx.Node, list[Any]] = {}
        self._slices: dict[tuple[fx.Node, Cut], list[fx.Node]] = {}
        self._wholes: dict[fx.Node, fx.Node] = {}
        self.made: dict[fx.Node, tuple[fx.Node, ...]] = {}
        self.joins = 0

    @property
    def wholes(self) -> dict[fx.Node, fx.Node]:
        """What is read in place of nodes of the region that are read whole."""
        return self._wholes

    def run(self) -> None:
        """Put parts in front of each node of the region, then erase it."""
        steps = self._region.steps
        for node in list(self._graph.nodes):
            with self._graph.inserting_before(node):
                if node in steps:
                    self._compute(node, steps[node])
                elif any(source in steps for source in node.all_input_nodes):
                    node.args = fx.node.map_arg(node.args, self._whole)
                    node.kwargs = fx.node.map_arg(node.kwargs, self._whole)
        # Backwards, because a node can only be erased after its readers.
        for node in reversed(steps):
            self._graph.erase_node(node)
        # Exchanges in chunks may have symbols for sizes that tracing never saw: an expected value
        # lets the cost model price them.
        expect_even_exchanges(self._graph)

    def _compute(self, node: fx.Node, step: InParts) -> None:
        made: list[Any] = []  # a tuple for a part where its results are of several nodes
        if step.make is not None:
            self._parts[node] = list(step.make(_Maker(self, node, step)))
            return
        if node.target is operator.getitem:
            several = self._parts.get(cast(fx.Node, node.args[0]), [None])
            if isinstance(several[0], tuple):
                self._parts[node] = [each[cast(int, node.args[1])] for each in several]
                return
        for i in range(1 if step.once else self._count):
            args, kwargs = self._given(node, step, i)
            target: object = node.target
            if step.out == SUM and made and target in ADDING:
                # One kernel adds to what is there.
                own = args if ADDING[target] is not target else args[1:]
                target, args = ADDING[target], (made[-1], *own)
            elif target in _VIEWS:  # a part may lie so that no view fits
                target = aten.reshape.default
            elif target is aten.split_with_sizes.default:
                self._check_pieces(args, node)
            part = self._emit(target, args, node, kwargs)
            if step.rows is not None:
                self._check_rows(part, step.rows, node)
            if step.out == SUM and made and node.target not in ADDING:
                # Added one by one, in order: two partial sums are alive at a time, and the order of
                # additions is fixed.
                part = self._emit(step.plus, (made[-1], part), node)
            made.append(part)
        if step.out == SUM:
            whole = made[-1]
            if step.mean:
                whole = self._emit(aten.div.Tensor, (whole, self._count), node)
            self._wholes[node] = whole
            return
        self._parts[node] = made
        if is_launch(node):
            self.made[node] = tuple(made)
            for i, part in enumerate(made):
                part.meta[MEMBERS] = part_of(node, i, self._count, self._launches[node])

    def _given(self, node: fx.Node, step: InParts, i: int) -> tuple[tuple[Any, ...], Any]:
        """Arguments of part ``i``. A launch sends what lies side by side."""

        def read(source: fx.Node) -> fx.Node:
            if source not in step.reads:
                return self._whole(source)
            part = self._part(source, step.reads[source], i)
            value = part.meta["val"]
            # A collective wants a contiguous input, and a chunk of a larger value often is none.
            if is_launch(node) and isinstance(value, torch.Tensor) and not _is_contiguous(value):
                return self._emit(aten.clone.default, (part,), source, CONTIGUOUS)
            return part

        args = step.args
        if callable(args):
            args = args(partial(self._size_of, step, i))
        elif args is None:
            args = node.args
        return fx.node.map_arg(args, read), fx.node.map_arg(node.kwargs, read)

    def _part(self, node: fx.Node, cut: Place, i: int) -> fx.Node:
        """Part ``i`` of a value: as it was computed, or a slice of all of it."""
        if node in self._parts:
            place = self._region.places[node]
            if place == cut or isinstance(place, tuple):
                return self._parts[node][i]
        assert isinstance(cut, Cut), f"{cut} of %{node.name}"
        key = node, cut
        if key not in self._slices:
            self._slices[key] = self._sliced(node, cut)
        return self._slices[key][i]

    def _sliced(self, node: fx.Node, cut: Cut) -> list[fx.Node]:
        whole, shape, dim = self._whole(node), shape_of(node), cut.dim
        if not known(shape) or not has_equal(cut, shape, self._count):
            return self._sliced_unequally(node, whole, cut)
        each = shape[dim] // cut.outer // self._count
        if cut.outer == 1:
            return [
                self._emit(aten.slice.Tensor, (whole, dim, i * each, (i + 1) * each), node)
                for i in range(self._count)
            ]
        # With several blocks a chunk is a piece of each: seen as [outer, count, rows], a ``select``
        # picks all of them at once.
        blocks = [*shape[:dim], cut.outer, self._count, each, *shape[dim + 1 :]]
        seen = self._emit(aten.reshape.default, (whole, blocks), node)
        part = smaller(shape, dim, self._count)
        found = []
        for i in range(self._count):
            piece = self._emit(aten.select.int, (seen, dim + 1, i), node)
            found.append(self._emit(aten.reshape.default, (piece, part), node))
        return found

    def _sliced_unequally(self, node: fx.Node, whole: fx.Node, cut: Cut) -> list[fx.Node]:
        """The same where parts may be unequal by a row, or sizes are symbols."""
        rows = self._divided(node, self._size(node, whole, cut.dim), cut.outer)
        # ``n * i // k``, as ``rule.py`` says: the same rows on every rank with as many, and none of
        # them twice.
        bounds = [self._divided(node, rows, self._count, i) for i in range(self._count)]
        pieces = list(itertools.pairwise([*bounds, rows]))
        if cut.outer == 1:
            return [self._emit(aten.slice.Tensor, (whole, cut.dim, a, b), node) for a, b in pieces]
        before, after = self._around(node, whole, cut.dim)
        blocks = [*before, cut.outer, rows, *after]
        seen = self._emit(aten.reshape.default, (whole, blocks), node)
        found = []
        for a, b in pieces:
            piece = self._emit(aten.slice.Tensor, (seen, cut.dim + 1, a, b), node)
            size = self._times(node, self._size(node, piece, cut.dim + 1), cut.outer)
            found.append(self._emit(aten.reshape.default, (piece, [*before, size, *after]), node))
        return found

    def _around(
        self, like: fx.Node, node: fx.Node, dim: int
    ) -> tuple[list[ChunkSize], list[ChunkSize]]:
        """Return the sizes of a node before and after a dimension."""
        last = node.meta["val"].dim()
        before, after = range(dim), range(dim + 1, last)
        return [self._size(like, node, d) for d in before], [
            self._size(like, node, d) for d in after
        ]

    def _size(self, like: fx.Node, node: fx.Node, dim: int) -> ChunkSize:
        """A size: a number, or a node that makes what is a symbol."""
        size = node.meta["val"].shape[dim]
        if isinstance(size, int):
            return size
        return self._emit(aten.sym_size.int, (node, dim), like)

    def _times(self, like: fx.Node, size: ChunkSize, times: int) -> ChunkSize:
        if isinstance(size, int):
            return size * times
        return size if times == 1 else self._emit(operator.mul, (size, times), like)

    def _divided(self, like: fx.Node, size: ChunkSize, by: int, times: int = 1) -> ChunkSize:
        """``size * times // by``, of a number or of a node."""
        if times == 0:
            return 0
        if isinstance(size, int):
            return size * times // by
        if by == times:
            return size
        return self._emit(operator.floordiv, (self._times(like, size, times), by), like)

    def _size_of(
        self, step: InParts, i: int, source: fx.Node, dim: int, by: int = 1, times: int = 1
    ) -> ChunkSize:
        part = self._part(source, step.reads[source], i)
        return self._divided(source, self._size(source, part, dim), by, times)

    def _whole(self, node: fx.Node) -> fx.Node:
        """All of a value: as it is, or its parts joined."""
        if node not in self._region.steps:
            return node
        if node not in self._wholes:
            cut = self._region.places[node]
            # Counts are no rows: the whole is their sum, not their join.
            if isinstance(cut, Addends):
                self._wholes[node] = self._added(node)
            elif isinstance(cut, tuple) or (is_view(node) and not _is_dense(node.meta["val"])):
                # No join lies in memory as a piece does: view the whole again.
                args = fx.node.map_arg(node.args, self._whole)
                self._wholes[node] = self._emit(node.target, args, node, node.kwargs)
            else:
                assert isinstance(cut, Cut), f"{cut} of %{node.name}"
                self._wholes[node] = self._joined(node, cut, self._parts[node])
                self.joins += 1
        return self._wholes[node]

    def _added(self, node: fx.Node) -> fx.Node:
        """The sum of counts; what is no tensor is made again of that, with the symbols that it
        had.
        """
        if isinstance(node.meta["val"], torch.Tensor):
            whole, *others = self._parts[node]
            for part in others:
                whole = self._emit(aten.add.Tensor, (whole, part), node)
            return whole
        with self._graph.inserting_before(node):
            again = self._graph.node_copy(node, self._whole)
        again.meta = dict(node.meta)
        return again

    def _check_pieces(self, args: tuple[Any, ...], node: fx.Node) -> None:
        """Check, when it runs, that the pieces of a part are all of it, if their sizes are
        symbols.
        """
        source, sizes, *dim = args
        if all(isinstance(size, int) for size in sizes):
            return
        at = dim[0] if dim else 0
        total = self._emit(torch.sym_sum, (list(sizes),), node)
        size = self._emit(aten.sym_size.int, (source, at), node)
        # Stated to the symbolic shapes for this trace, and checked by an operator when it runs: a
        # wrong count would otherwise read beyond a buffer.
        hold(total.meta["val"] == size.meta["val"])
        same = self._emit(operator.eq, (total, size), node)
        said = f"The pieces of a part of %{node.name} are not all of it."
        self._emit(aten._assert_scalar.default, (same, said), node)

    def _check_rows(self, part: fx.Node, rows: int, node: fx.Node) -> None:
        """Check, when it runs, that a part has so many rows; sizes that are made of it may rely
        on that.
        """
        found = part.meta["val"].shape[0]
        if isinstance(found, int):
            return
        hold(found == rows)
        size = self._emit(aten.sym_size.int, (part, 0), node)
        same = self._emit(operator.eq, (size, rows), node)
        said = f"A part of %{node.name} has not {rows} rows."
        self._emit(aten._assert_scalar.default, (same, said), node)

    def _joined(self, node: fx.Node, cut: Cut, parts: Sequence[fx.Node]) -> fx.Node:
        """Join the chunks in the memory order of the value, because readers rely on its strides."""
        # ``cat`` makes a contiguous result, but a reader may have been traced for other strides:
        # join in memory order, then permute back.
        order = _memory_order(node.meta["val"])
        equal = has_equal(cut, shape_of(node), self._count)
        turned = order != sorted(order)
        dim = order.index(cut.dim)
        if turned:
            parts = [self._emit(aten.permute.default, (part, order), node) for part in parts]
        if cut.outer == 1:
            joined = self._emit(aten.cat.default, (list(parts), dim), node)
        else:
            before, after = self._around(node, parts[0], dim)
            seen = []
            for part in parts:
                rows = self._divided(node, self._size(node, part, dim), cut.outer)
                blocks = [*before, cut.outer, *([1] if equal else []), rows, *after]
                seen.append(self._emit(aten.reshape.default, (part, blocks), node))
            joined = self._emit(aten.cat.default, (seen, dim + 1), node)
            if equal:
                size = self._times(node, rows, cut.outer * self._count)
            else:
                size = self._times(node, self._size(node, joined, dim + 1), cut.outer)
            joined = self._emit(aten.reshape.default, (joined, [*before, size, *after]), node)
        if turned:
            back = [order.index(d) for d in range(len(order))]
            joined = self._emit(aten.permute.default, (joined, back), node)
        return joined

    def _emit(
        self,
        target: object,
        args: tuple[object, ...],
        like: fx.Node,
        kwargs: Mapping[str, object] | None = None,
    ) -> fx.Node:
        # An operator of sizes alone has no fake tensor among its arguments that would bring its
        # mode.
        with mode_of(like.meta.get("val")) if _makes_of_sizes(args) else contextlib.nullcontext():
            value_of = _bounded if target in BOUNDS else self._values.of
            made = emit(self._graph, target, args, like, kwargs, value_of)
        # Inductor defines a symbol at the node whose ``unbacked_bindings`` name it, and fails on
        # one that no node defines.
        if target in _MAKE_SYMBOLS and (symbols := new_symbols(made.meta["val"])):
            made.meta["unbacked_bindings"] = symbols
        return made


def cut_all(
    graph: fx.Graph,
    regions: Sequence[Region],
    cut: Callable[[Region], Cutter] | None = None,
    values: Values | None = None,
) -> list[Cutter]:
    """Write regions that share no node into their graph, one after the other; ``cut``: how one
    is written.
    """
    made: list[Cutter] = []
    wholes: dict[fx.Node, fx.Node] = {}
    for region in regions:
        # Regions were found in the graph as it was; what an earlier one wrote has replaced nodes at
        # their edges.
        its = region.again(Positions(graph), wholes) if wholes else region
        if cut is not None:
            made.append(cut(its))
        else:
            made.append(Cutter(graph, its, values))
            made[-1].run()
        wholes.update(made[-1].wholes)
    return made


class _Maker:
    """Makes the parts of one node, for a rule that does so itself (``places.Maker``)."""

    def __init__(self, cutter: Cutter, node: fx.Node, step: InParts) -> None:
        self.node, self.count = node, cutter._count
        self._cutter, self._step = cutter, step

    def parts(self, source: object) -> list[fx.Node]:
        assert isinstance(source, fx.Node)
        return [self._cutter._part(source, self._step.reads[source], i) for i in range(self.count)]

    def emit(
        self, target: object, args: tuple[object, ...], kwargs: Mapping[str, object] | None = None
    ) -> fx.Node:
        return self._cutter._emit(target, args, self.node, kwargs)

    def pick(self, several: fx.Node, index: int) -> fx.Node:
        return self.emit(operator.getitem, (several, index))


def _bounded(node: fx.Node) -> None:
    """Turn a bound of a size into a condition; a call of it would ask for the number."""
    size = node.args[0]
    assert isinstance(size, fx.Node)
    hold(size.meta["val"] >= 0)


def _makes_of_sizes(args: Any) -> bool:
    """Return whether an operator makes a value of numbers alone."""
    found: list[fx.Node] = []
    fx.node.map_arg(args, found.append)
    return not any(isinstance(node.meta.get("val"), (torch.Tensor, list, tuple)) for node in found)


def _is_contiguous(value: torch.Tensor) -> bool:
    """Return whether elements lie side by side; of symbols as far as expressions show it."""
    if all(isinstance(size, int) for size in (*value.shape, *value.stride())):
        return value.is_contiguous()
    expected: Any = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if str(stride) != str(expected):
            return False
        expected = expected * size
    return True


def _memory_order(value: torch.Tensor) -> list[int]:
    """Dimensions as they lie in memory, outermost first; those of one element stay among their
    neighbours.
    """
    strides = value.stride()
    return sorted(range(value.dim()), key=lambda d: (-size_hint(strides[d]), d))


def _is_dense(value: torch.Tensor) -> bool:
    """Return whether a value fills its memory, each element once."""
    expected: Any = 1
    for dim in reversed(_memory_order(value)):
        one = is_broadcast(value.shape[dim])
        if not one and not surely_equal(value.stride(dim), expected):
            return False
        expected *= value.shape[dim]
    return True
