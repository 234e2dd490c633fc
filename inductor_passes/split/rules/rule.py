"""The form of a rule, and what rules ask of a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import aten, prims, tensor
from inductor_passes.split.rules.places import Cut, EndsError, InParts, Place

# Node, places of those of its inputs that lie in parts, number of parts -> step; raises EndsError.
Rule = Callable[[fx.Node, Mapping[fx.Node, Place], int], InParts]


def source_of(node: fx.Node) -> fx.Node:
    """Return the first argument, which must be a node."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        raise EndsError("its first argument is no value")
    return first


def cut_of(node: fx.Node, places: Mapping[fx.Node, Place]) -> tuple[fx.Node, Cut]:
    """Return the first argument, which must lie in parts, and its cut."""
    source = source_of(node)
    cut = places.get(source)
    if not isinstance(cut, Cut):
        raise EndsError("only values that it reads besides lie in parts")
    return source, cut


def dims_of(node: fx.Node, rank: int, name: str = "dim", default: object = None) -> list[int]:
    """Return an argument that names dimensions, each from 0 on."""
    given = argument(node, name)
    given = default if given is None else given
    listed = given if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(dim, int) for dim in listed):
        raise EndsError("it names its dimensions by values")
    return [dim % max(rank, 1) for dim in listed if isinstance(dim, int)]


def keeps_apart(cut: Cut, dims: list[int]) -> None:
    """Raise EndsError if an operator mixes what lies along ``dims``, and the parts lie along one of them."""
    if cut.dim in dims:
        raise EndsError(f"it mixes what the parts hold ({cut})")


def extents(node: object) -> tuple[Any, ...]:
    """Return the local shape of a node, symbols as expressions. Raises EndsError unless it is a tensor."""
    found = tensor(node)
    if found is None:
        raise EndsError("it is not one tensor")
    return tuple(size if isinstance(size, int) else size.node.expr for size in found.shape)


_FILLED = (aten.full.default, aten.full_like.default, aten.new_full.default)
_FILLS: dict[object, int] = {
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), 0),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), 1),
}
_SHOWN = (
    aten.expand.default,
    aten.view.default,
    aten.reshape.default,
    aten.unsqueeze.default,
    aten.clone.default,
    prims.convert_element_type.default,
)


def filled_with(node: object) -> object:
    """Return the number that all elements of a value are; None if they are not all one that is known."""
    while isinstance(node, fx.Node) and node.target in _SHOWN:
        node = node.args[0]
    if not isinstance(node, fx.Node):
        return None
    if node.target in _FILLED:
        value = argument(node, "fill_value")
        return None if isinstance(value, fx.Node) else value
    return _FILLS.get(node.target)


MOST = 4096  # elements of a constant


def constant(node: fx.Node) -> torch.Tensor | None:
    """Return the value of a node that is made of numbers alone, small ones; None of any other."""
    found, target = tensor(node), node.target
    if found is None or not all(isinstance(size, int) for size in found.shape):
        return None
    if found.numel() > MOST or not isinstance(target, torch._ops.OpOverload):
        return None
    if target.namespace not in ("aten", "prims") or target._schema.is_mutable:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    values = {source: constant(source) for source in node.all_input_nodes}
    if any(value is None for value in values.values()):
        return None
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
    made = target(*args, **{**kwargs, **({"device": "cpu"} if "device" in kwargs else {})})
    return made if type(made) is torch.Tensor else None
