"""Operators that compute each element from those at its place: parts stay apart."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from inductor_passes.graph.edit import aten, prims
from inductor_passes.split.rules.rule import (
    Cut,
    EndsError,
    InParts,
    Place,
    is_broadcast,
    is_tensor,
    shape_of,
)

# Elementwise, though torch does not tag them so.
_UNTAGGED = frozenset(
    (
        prims.convert_element_type.default,
        aten.floor_divide.default,
        aten.clone.default,
        aten.detach.default,
        aten.alias.default,
        aten._to_copy.default,
        aten.full_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
    )
)


def is_elementwise(target: object) -> bool:
    """Return whether an operator is elementwise, by its tag or by name."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target in _UNTAGGED


def elementwise(node: fx.Node, places: Mapping[fx.Node, Place], parts: int) -> InParts:
    """Align inputs from the right; of those that are not broadcast along the parts, each part reads its own."""
    rank = len(shape_of(node))
    cuts = {
        place.moved(rank - len(shape_of(source)))
        for source, place in places.items()
        if isinstance(place, Cut)
    }
    if len(cuts) != 1:
        raise EndsError("its inputs lie in unlike parts")
    (cut,) = cuts
    reads = {}
    for source in filter(is_tensor, node.all_input_nodes):
        shape = shape_of(source)
        own = cut.moved(len(shape) - rank)
        if own.dim >= 0 and not is_broadcast(shape[own.dim]):
            reads[source] = own
    return InParts(cut, reads)
