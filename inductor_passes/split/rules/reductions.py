"""Reductions: along other dimensions parts stay apart; over the parts, a sum is the sum of theirs, a maximum their maximum."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import aten
from inductor_passes.split.rules.elementwise import elementwise
from inductor_passes.split.rules.rule import (
    SUM,
    Cut,
    EndsError,
    InParts,
    Place,
    Rule,
    cut_of,
    dims_of,
    has_equal,
    keeps_apart,
    shape_of,
)

Places = Mapping[fx.Node, Place]
# What makes the reduction over all parts of those over each.
PLUS = {
    **dict.fromkeys((aten.sum.default, aten.sum.dim_IntList), aten.add.Tensor),
    **dict.fromkeys((aten.mean.default, aten.mean.dim), aten.add.Tensor),
    aten.amax.default: aten.maximum.default,
    aten.amin.default: aten.minimum.default,
    **dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), aten.bitwise_or.Tensor),
    **dict.fromkeys((aten.all.default, aten.all.dim, aten.all.dims), aten.bitwise_and.Tensor),
}
_MEANS = (aten.mean.default, aten.mean.dim)


def reduce(node: fx.Node, places: Places, parts: int) -> InParts:
    """Count the dimensions that go; of a reduction over the parts, put theirs together."""
    source, cut = cut_of(node, places)
    rank = len(shape_of(source))
    dims = dims_of(node, rank, default=list(range(rank))) or list(range(rank))
    if cut.dim in dims:
        if node.target not in PLUS:
            raise EndsError(f"it reduces over the parts and is no sum ({cut})")
        mean = node.target in _MEANS
        if mean and not has_equal(cut, shape_of(source), parts):
            raise EndsError("a mean of unequal parts is none of theirs")
        return InParts(SUM, {source: cut}, plus=PLUS[node.target], mean=mean)
    gone = 0 if argument(node, "keepdim") else sum(dim < cut.dim for dim in set(dims))
    several = node.meta.get("val")
    made = cut.moved(-gone)
    return InParts(
        (made,) * len(several) if isinstance(several, (list, tuple)) else made, {source: cut}
    )


def along(node: fx.Node, places: Places, parts: int) -> InParts:
    """Sort, pick or accumulate along one dimension, in which the parts do not lie; shapes stay."""
    source, cut = cut_of(node, places)
    keeps_apart(cut, dims_of(node, len(shape_of(source)), default=-1))
    several = node.meta.get("val")
    return InParts(
        (cut,) * len(several) if isinstance(several, (list, tuple)) else cut, {source: cut}
    )


def softmax(node: fx.Node, places: Places, parts: int) -> InParts:
    """Normalize along one dimension, in which the parts do not lie."""
    step = elementwise(node, places, parts)
    assert isinstance(step.out, Cut)
    keeps_apart(step.out, dims_of(node, len(shape_of(node))))
    return step


RULES: dict[object, Rule] = {
    **dict.fromkeys(
        (
            *PLUS,
            aten.argmax.default,
            aten.argmin.default,
            aten.var.correction,
            aten.var_mean.correction,
        ),
        reduce,
    ),
    **dict.fromkeys((aten.cumsum.default, aten.topk.default, aten.sort.default), along),
    **dict.fromkeys(
        (
            aten._softmax.default,
            aten._log_softmax.default,
            aten._softmax_backward_data.default,
            aten._log_softmax_backward_data.default,
        ),
        softmax,
    ),
}
