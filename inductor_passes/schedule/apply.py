"""From a schedule to the graph: put its nodes in order, make each bucket one launch.

A bucket runs in one of two styles. *Packed*: inputs are copied into one buffer, one ordinary
collective moves it, and what arrives is cut up. *Coalesced*: one call that launches all members,
without copies, as ``_c10d_functional`` has for gathers and reduce-scatters. The cost model says
which is faster.

With n ranks, the members of a packed bucket lie in its buffer like this, where m is a member's
bytes and M their sum:

- all_reduce, all_gather: flat, one after another; a gather's result is [n, M], cut in columns of m;
- reduce_scatter, all_to_all: each member as [n, m/n], side by side as [n, M/n], cut in columns too.

Each element keeps its member and its rank, so nothing but the order of additions can differ.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.graph.collectives import (
    MEMBERS,
    group_size,
    kind,
    numbers_of,
    output_bytes,
    payload_bytes,
    sent_by,
    waits_of,
)
from inductor_passes.graph.dependencies import relink
from inductor_passes.graph.invariants import epilogue
from inductor_passes.graph.printing import CAUSE
from inductor_passes.schedule.solver.problem import UNPACKED_OPS

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
COALESCED = {
    "all_gather": c10d.all_gather_into_tensor_coalesced.default,
    "reduce_scatter": c10d.reduce_scatter_tensor_coalesced.default,
}


@dataclass(frozen=True, slots=True)
class MergedLaunches:
    """Launches that were merged, and what stands in their place.

    ``members``, ``waits``: nodes that are gone. ``launch``: the one launch. ``landed``: where its
    first result is waited for. ``results``: what the users of each member's wait read now.
    ``made``: every node that is new.
    """

    members: tuple[fx.Node, ...]
    waits: tuple[fx.Node, ...]
    launch: fx.Node
    landed: fx.Node
    results: tuple[fx.Node, ...]
    made: tuple[fx.Node, ...]


def apply(
    graph: fx.Graph,
    order: Sequence[fx.Node],
    buckets: Sequence[Sequence[fx.Node]],
    cost: CostModel,
    coalesced: Sequence[bool] | None = None,
) -> list[MergedLaunches]:
    """Rewrite ``graph`` in place. ``order`` holds every node once; a bucket's launches are
    neighbours in it, and so are its waits. Inputs keep the order of the graph's signature, and
    writes to them that end the graph their place.
    ``coalesced``: the style of each bucket of several, where others have chosen it.
    """
    # The signature of the graph is the order of its placeholders: a schedule must not touch it.
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    # Inductor computes what these write in its place; passes that come later want them at the end.
    writes = epilogue(graph)
    ends = {*inputs, *writes, graph.output_node()}
    middle = [node for node in order if node not in ends]
    relink(graph, [*inputs, *middle, *reversed(writes), graph.output_node()])
    place = {node: i for i, node in enumerate(graph.nodes)}
    several = [members for members in buckets if len(members) > 1]
    if coalesced is None:
        # In the order of the graph, whatever order the solver has them in: the members' places in
        # the packed buffer must be the same on every rank. A plan from another rank brings its own
        # order.
        several = [sorted(members, key=place.__getitem__) for members in several]
        coalesced = [is_coalescing_faster(members, cost) for members in several]
    return [
        _merge(graph, members, style) for members, style in zip(several, coalesced, strict=True)
    ]


def is_coalescing_faster(members: Sequence[fx.Node], cost: CostModel) -> bool:
    """Return whether one call without copies is predicted to beat one large launch with them."""
    name, sizes = kind(members[0]), [payload_bytes(member) for member in members]
    if name not in COALESCED:
        return False
    copied = sum(sizes)
    # Gathers and exchanges are copied in and out. Reductions are copied in only: their results are
    # views of one buffer.
    if name in UNPACKED_OPS:
        copied += sum(output_bytes(member) for member in members)
    # Twice, because a copy reads and writes each byte.
    packed_us = cost.link_us(members[0], [sum(sizes)]) + 2 * copied / cost.copy_bytes_per_us
    return cost.link_us(members[0], sizes) < packed_us


def _merge(graph: fx.Graph, members: Sequence[fx.Node], coalesced: bool) -> MergedLaunches:
    waits = [waits_of(member)[0] for member in members]
    order = {node: i for i, node in enumerate(graph.nodes)}
    # The launch goes where the last member stood, since all inputs exist there, and the wait where
    # the first one stood. Both are neighbours in a valid schedule, so that nothing in between is
    # passed.
    launched, landed = max(members, key=order.__getitem__), min(waits, key=order.__getitem__)
    writer = _Writer(graph)
    start, land = (
        (_start_coalesced, _land_coalesced) if coalesced else (_start_packed, _land_packed)
    )
    with writer.at(launched.next, like=members[0]):
        launch = start(writer, members)
        launch.meta[MEMBERS] = numbers_of(members)
    with writer.at(landed, like=waits[0]):
        first_wait, results = land(writer, launch, members)
    for wait, result in zip(waits, results, strict=True):
        wait.replace_all_uses_with(result)
        graph.erase_node(wait)
    for member in members:
        graph.erase_node(member)
    return MergedLaunches(
        tuple(members), tuple(waits), launch, first_wait, tuple(results), tuple(writer.made)
    )


def _start_packed(writer: _Writer, members: Sequence[fx.Node]) -> fx.Node:
    first, name, size = members[0], kind(members[0]), group_size(members[0])
    inputs = [source for member in members for source in sent_by(member)]
    if name in ("all_reduce", "all_gather"):
        parts = [writer.call(aten.reshape.default, source, [-1]) for source in inputs]
        packed = writer.call(aten.cat.default, parts)
    else:
        # One row for each rank: side by side, row r of the packed buffer is what rank r gets of
        # every member. Flat, a rank's share would mix members.
        parts = [writer.call(aten.reshape.default, source, [size, -1]) for source in inputs]
        packed = writer.call(aten.cat.default, parts, 1)
    rest = list(first.args[1:])
    if name == "all_to_all":
        # Split sizes count rows of dimension 0, and the packed buffer has one row for each rank.
        rest[:2] = [[1] * size, [1] * size]
    return writer.call(_callable(first), packed, *rest, **first.kwargs)


def _callable(node: fx.Node) -> Callable[..., Any]:
    assert callable(node.target)
    return node.target


def _land_packed(
    writer: _Writer, launch: fx.Node, members: Sequence[fx.Node]
) -> tuple[fx.Node, list[fx.Node]]:
    wait = writer.call(c10d.wait_tensor.default, launch)
    # A gather's result holds each rank's packed buffer after the other, so a member's result is a
    # column of all rows. A reduction's result is one row.
    rows = group_size(members[0]) if kind(members[0]) in UNPACKED_OPS else 1
    table = writer.call(aten.reshape.default, wait, [rows, -1])
    shapes = [_shape(writer, member) for member in members]
    widths = [_width(writer, shape, rows) for shape in shapes]
    columns = writer.call(aten.split_with_sizes.default, table, widths, 1)
    results = [
        writer.call(aten.reshape.default, writer.call(operator.getitem, columns, i), shape)
        for i, shape in enumerate(shapes)
    ]
    return wait, results


Size = int | fx.Node


def _shape(writer: _Writer, member: fx.Node) -> list[Size]:
    """The shape of a launch's result; symbolic sizes as nodes that read them off its input."""
    (source,) = sent_by(member)
    given = source.meta["val"].shape
    found: list[Size] = []
    for dim, size in enumerate(member.meta["val"].shape):
        if not isinstance(size, int):
            # By their text: comparing symbols with ``==`` would add a guard to the graph.
            assert dim == 0 or str(given[dim]) == str(size)
            size = _read(writer, member, dim)
        found.append(size)
    return found


def _read(writer: _Writer, member: fx.Node, dim: int) -> fx.Node:
    """A symbolic size of a launch's result, read off its input."""
    (source,) = sent_by(member)
    node = writer.call(aten.sym_size.int, source, dim)
    if dim == 0 and kind(member) == "all_gather":
        node = writer.call(operator.mul, node, group_size(member))
    elif dim == 0 and kind(member) == "reduce_scatter":
        node = writer.call(operator.floordiv, node, group_size(member))
    return node


def read_sizes_of_inputs(graph: fx.Graph) -> None:
    """Have symbolic sizes of what is launched or waited for read off the launch's input instead.

    Sizes are known before anything is launched: what needs them alone must not wait, and is no
    reason not to merge the launch.
    """
    for launch in list(graph.nodes):
        if kind(launch) not in ("all_reduce", "all_gather", "reduce_scatter"):
            continue
        if len(sent_by(launch)) != 1:
            continue
        for result in (launch, *waits_of(launch)):
            for user in [each for each in result.users if each.target is aten.sym_size.int]:
                writer = _Writer(graph)
                with writer.at(user, like=user):
                    user.replace_all_uses_with(_read(writer, launch, int(user.args[1])))
                graph.erase_node(user)


def _width(writer: _Writer, shape: Sequence[Size], rows: int) -> Size:
    """Elements of a result in each of ``rows``."""
    width: Size = math.prod(size for size in shape if isinstance(size, int))
    for size in shape:
        if isinstance(size, fx.Node):
            width = writer.call(operator.mul, size, width)
    if isinstance(width, int):
        return width // rows
    return width if rows == 1 else writer.call(operator.floordiv, width, rows)


def _start_coalesced(writer: _Writer, members: Sequence[fx.Node]) -> fx.Node:
    first = members[0]
    inputs = [source for member in members for source in sent_by(member)]
    return writer.call(COALESCED[kind(first)], inputs, *first.args[1:], **first.kwargs)


def _land_coalesced(
    writer: _Writer, launch: fx.Node, members: Sequence[fx.Node]
) -> tuple[fx.Node, list[fx.Node]]:
    parts = [writer.call(operator.getitem, launch, i) for i in range(len(members))]
    waits = [writer.call(c10d.wait_tensor.default, part) for part in parts]
    return waits[0], waits


class _Writer:
    """New nodes with their values' shapes and the user's line and annotations of what they
    replace.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._like: fx.Node | None = None
        self.made: list[fx.Node] = []

    def at(self, place: fx.Node, *, like: fx.Node) -> Any:
        """A block whose nodes stand before ``place`` and point at the line that made ``like``."""
        self._like = like
        return self._graph.inserting_before(place)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """One call; its value is computed on the fake values of its inputs."""
        node = self._graph.call_function(target, args, kwargs)
        for key in ("stack_trace", "custom", CAUSE):
            if self._like is not None and self._like.meta.get(key) is not None:
                node.meta[key] = self._like.meta[key]
        given, named = fx.map_arg((args, kwargs), lambda source: source.meta["val"])
        # Run on fake tensors, so that shape, stride and dtype are what torch makes and not what
        # this file thinks.
        node.meta["val"] = target(*given, **named)
        self.made.append(node)
        return node
