"""Views that keep the rows of a matrix in order: what a fused product may look through."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

from torch import fx

from inductor_passes.graph.edit import aten, emit, static_shape

RESHAPES = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
    }
)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def row_source(node: fx.Node) -> fx.Node | None:
    """The node whose elements ``node`` has in the same order, with the same last dimension; else None.

    A reshape's input; and what was split and joined along another dimension, as gathers along it are
    unpacked, where no dimension before either is larger than one.
    """
    if node.op != "call_function":
        return None
    source = node.args[0] if node.target in RESHAPES else _split_and_joined(node)
    if not isinstance(source, fx.Node):
        return None
    shape, was = static_shape(node), static_shape(source)
    if not shape or not was or shape[-1] != was[-1] or math.prod(shape) != math.prod(was):
        return None
    return source


def row_views(node: fx.Node) -> list[fx.Node]:
    """The nodes of which ``node`` is the ``row_source``."""
    ends: dict[fx.Node, None] = {}
    for user in node.users:
        if user.target in SPLITS:
            ends.update((end, None) for part in user.users for end in part.users)
        else:
            ends[user] = None
    return [end for end in ends if row_source(end) is node]


def reshaped(graph: fx.Graph, node: fx.Node, shape: Sequence[int], like: fx.Node) -> fx.Node:
    """``node`` in that shape, in the name of ``like``; the node itself if it has it already."""
    if static_shape(node) == tuple(shape):
        return node
    return emit(graph, aten.reshape.default, (node, list(shape)), like)


def _split_and_joined(cat: fx.Node) -> object:
    if cat.target is not aten.cat.default or not isinstance(cat.args[0], (list, tuple)):
        return None
    parts = list(cat.args[0])
    if not parts or not isinstance(parts[0], fx.Node) or parts[0].target is not operator.getitem:
        return None
    split = parts[0].args[0]
    if not isinstance(split, fx.Node) or split.target not in SPLITS:
        return None
    value = split.meta["val"]
    if [(p.target, p.args) for p in parts] != [
        (operator.getitem, (split, i)) for i in range(len(value))
    ]:
        return None
    source = split.args[0]
    assert isinstance(source, fx.Node)
    split_dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    cat_dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    whole, part = static_shape(source), tuple(value[0].shape)
    if not isinstance(split_dim, int) or not isinstance(cat_dim, int) or whole is None:
        return None
    leading = (*whole[: split_dim % len(whole)], *part[: cat_dim % len(part)])
    return source if all(size == 1 for size in leading) else None
