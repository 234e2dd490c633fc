"""Matrix products: rows, columns and batches stay apart; along what is contracted, parts are sums."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import aten
from inductor_passes.split.rules.rule import (
    SUM,
    Cut,
    EndsError,
    InParts,
    Place,
    Rule,
    is_broadcast,
    is_tensor,
    shape_of,
)

# What adds a product to what is there, for the parts of a sum.
ADDING = {
    aten.mm.default: aten.addmm.default,
    aten.addmm.default: aten.addmm.default,
    aten.bmm.default: aten.baddbmm.default,
    aten.baddbmm.default: aten.baddbmm.default,
}
AS_BIAS = "one value is an operand and the bias, and they lie in unlike parts"


def product(node: fx.Node, places: Mapping[fx.Node, Place], parts: int) -> InParts:
    """Read both operands as the parts of one of them ask; a bias like the result."""
    a, b = node.args[-2:]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    rank = len(shape_of(node))
    rows, columns = rank - 2, rank - 1
    left, right = places.get(a), places.get(b)
    if (isinstance(left, Cut) and left.dim == columns) or (
        isinstance(right, Cut) and right.dim == rows
    ):
        return _summed(node, a, b, places)
    cut, reads = None, {}
    if isinstance(left, Cut):  # rows, or batches
        cut, reads = left, {a: left}
        if left.dim < rows:
            reads[b] = left
    elif isinstance(right, Cut):
        cut, reads = right, {b: right}
        if right.dim < rows:
            reads[a] = right
    if cut is None:
        raise EndsError("only its bias lies in parts")
    bias = node.args[0] if len(node.args) > 2 else None
    if isinstance(bias, fx.Node) and is_tensor(bias):
        own = cut.moved(len(shape_of(bias)) - rank)
        in_parts = own.dim >= 0 and not is_broadcast(shape_of(bias)[own.dim])
        if bias in (a, b) and reads.get(bias) != (own if in_parts else None):
            raise EndsError(AS_BIAS)
        if in_parts:
            reads[bias] = own
    return InParts(cut, reads)


def _summed(node: fx.Node, a: fx.Node, b: fx.Node, places: Mapping[fx.Node, Place]) -> InParts:
    """Contract part by part: what lies in no parts is read in those of the other operand."""
    rank = len(shape_of(node))
    found = [
        place.outer
        for source, dim in ((a, rank - 1), (b, rank - 2))
        if isinstance(place := places.get(source), Cut) and place.dim == dim
    ]
    if any(argument(node, name) not in (None, 1) for name in ("alpha", "beta")):
        raise EndsError("its sum is scaled")
    if a is b or len(set(found)) > 1:
        raise EndsError("its operands lie in unlike parts")
    if len(node.args) > 2 and node.args[0] in (a, b):
        raise EndsError(AS_BIAS)
    return InParts(SUM, {a: Cut(rank - 1, found[0]), b: Cut(rank - 2, found[0])})


RULES: dict[object, Rule] = dict.fromkeys(ADDING, product)
