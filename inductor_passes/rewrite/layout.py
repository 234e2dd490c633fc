"""Cuts and joins of a dimension that is not the first, around collectives that cut and join the first."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.graph.edit import aten, emit, static_shape

CONTIGUOUS = {"memory_format": torch.contiguous_format}


@dataclass(frozen=True, slots=True)
class Gathered:
    """``node`` holds what ``wait`` brought, joined along ``dim``; ``between`` are the nodes that joined it."""

    node: fx.Node
    dim: int
    between: tuple[fx.Node, ...] = ()


def gathered(wait: fx.Node, count: int) -> Gathered:
    """Return the value that an all_gather over ``count`` ranks brought: joined by a split and a cat, or as it came."""
    shape = static_shape(wait)
    users = list(wait.users)
    plain = Gathered(wait, 0)
    if shape is None or len(users) != 1 or users[0].target is not aten.split.Tensor:
        return plain
    split = users[0]
    if (len(split.args) > 2 and split.args[2] != 0) or split.args[1] != shape[0] // count:
        return plain
    pieces = sorted(split.users, key=lambda n: n.args[1] if isinstance(n.args[1], int) else -1)
    if [p.args[1] for p in pieces] != list(range(count)):
        return plain
    joins = {user for piece in pieces for user in piece.users}
    if len(joins) != 1 or any(p.target is not operator.getitem for p in pieces):
        return plain
    cat = joins.pop()
    if cat.target is not aten.cat.default or cat.args[0] != pieces:
        return plain
    dim = cat.args[1] if len(cat.args) > 1 else 0
    assert isinstance(dim, int)
    return Gathered(cat, dim % len(shape), (split, *pieces))


def cut_first(graph: fx.Graph, node: fx.Node, dim: int, count: int, like: fx.Node) -> fx.Node:
    """Cut ``dim`` in ``count`` parts and stack them: the first dimension becomes ``count`` times as long.

    Local shapes: [a, d, ...] cut along 1 gives [count * a, d / count, ...]. No node for dimension 0.
    """
    shape = static_shape(node)
    assert shape is not None
    local = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    stacked_shape = [count * local[0], *local[1:]]
    if dim == 0:
        return node
    if all(size == 1 for size in shape[:dim]):
        return emit(graph, aten.reshape.default, (node, stacked_shape), like)
    parts = (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
    order = (dim, *(i for i in range(len(parts)) if i != dim))
    stacked = _permuted(graph, node, parts, order, like)
    return emit(graph, aten.view.default, (stacked, stacked_shape), like)


def join_at(graph: fx.Graph, node: fx.Node, dim: int, count: int, like: fx.Node) -> fx.Node:
    """Inverse of ``cut_first``: [count * a, d, ...] joined along 1 gives [a, count * d, ...]."""
    shape = static_shape(node)
    assert shape is not None
    if dim == 0:
        return node
    local = (shape[0] // count, *shape[1:])
    whole = [*local[:dim], count * local[dim], *local[dim + 1 :]]
    if joins_as_view(shape, dim, count):
        return emit(graph, aten.reshape.default, (node, whole), like)
    order = (*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1))
    joined = _permuted(graph, node, (count, *local), order, like)
    return emit(graph, aten.view.default, (joined, whole), like)


def joins_as_view(shape: Sequence[int], dim: int, count: int) -> bool:
    """Return whether what came as ``shape`` is joined along ``dim`` as it lies: only ones stand before ``dim``."""
    return shape[0] == count and all(size == 1 for size in shape[1:dim])


def _permuted(
    graph: fx.Graph, node: fx.Node, shape: Sequence[int], order: Sequence[int], like: fx.Node
) -> fx.Node:
    """A contiguous permutation of ``node`` seen as ``shape``: one copy at most, which may fuse."""
    seen = emit(graph, aten.reshape.default, (node, list(shape)), like)
    turned = emit(graph, aten.permute.default, (seen, list(order)), like)
    return emit(graph, aten.clone.default, (turned,), like, CONTIGUOUS)
