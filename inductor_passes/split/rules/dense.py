"""Split elementwise operators, matrix products and reductions."""

from __future__ import annotations

import torch
from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import aten, prims
from inductor_passes.split.rules.rule import (
    SUM,
    Cut,
    EndsError,
    InParts,
    Layouts,
    Rule,
    cut_of,
    dims_of,
    has_equal,
    is_broadcast,
    is_tensor,
    keeps_apart,
    of_each_result,
    shape_of,
    shared_cut,
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


def elementwise(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Align inputs from the right; of those that are not broadcast along the parts, each part
    reads its own.
    """
    rank = len(shape_of(node))
    # Split twice, by rows and by columns, it would be parts x parts chunks.
    cut = shared_cut(
        layout.moved(rank - len(shape_of(source)))
        for source, layout in layouts.items()
        if isinstance(layout, Cut)
    )
    reads = {}
    for source in filter(is_tensor, node.all_input_nodes):
        shape = shape_of(source)
        own = cut.moved(len(shape) - rank)
        # A broadcast operand has nothing to cut: each chunk reads all of it.
        if own.dim >= 0 and not is_broadcast(shape[own.dim]):
            reads[source] = own
    return InParts(cut, reads)


# What adds a product to what is there, for the parts of a sum.
ADDING = {
    aten.mm.default: aten.addmm.default,
    aten.addmm.default: aten.addmm.default,
    aten.bmm.default: aten.baddbmm.default,
    aten.baddbmm.default: aten.baddbmm.default,
}
AS_BIAS = "one value is an operand and the bias, and they lie in unlike parts"


def product(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Read both operands as the parts of one of them ask; a bias like the result."""
    a, b = node.args[-2:]
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    rank = len(shape_of(node))
    rows, columns = rank - 2, rank - 1
    left, right = layouts.get(a), layouts.get(b)
    # Cut along K: each chunk is a product of full size, and the result their sum.
    if (isinstance(left, Cut) and left.dim == columns) or (
        isinstance(right, Cut) and right.dim == rows
    ):
        return _summed(node, a, b, layouts)
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
        # A node is read in one way by a step: as operand and as bias it would need two.
        if bias in (a, b) and reads.get(bias) != (own if in_parts else None):
            raise EndsError(AS_BIAS)
        if in_parts:
            reads[bias] = own
    return InParts(cut, reads)


def _summed(node: fx.Node, a: fx.Node, b: fx.Node, layouts: Layouts) -> InParts:
    """Contract part by part: what lies in no parts is read in those of the other operand."""
    rank = len(shape_of(node))
    found = [
        layout.outer
        for source, dim in ((a, rank - 1), (b, rank - 2))
        if isinstance(layout := layouts.get(source), Cut) and layout.dim == dim
    ]
    # ``addmm`` scales what it adds to: chained over chunks, that is the sum so far.
    if any(argument(node, name) not in (None, 1) for name in ("alpha", "beta")):
        raise EndsError("its sum is scaled")
    # ``x @ x`` is cut along its rows as one operand and its columns as the other: no single layout
    # says both.
    if a is b or len(set(found)) > 1:
        raise EndsError("its operands lie in unlike parts")
    if len(node.args) > 2 and node.args[0] in (a, b):
        raise EndsError(AS_BIAS)
    return InParts(SUM, {a: Cut(rank - 1, found[0]), b: Cut(rank - 2, found[0])})


PRODUCT_RULES: dict[object, Rule] = dict.fromkeys(ADDING, product)


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


def reduce(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Count the dimensions that go; of a reduction over the parts, put theirs together."""
    source, cut = cut_of(node, layouts)
    rank = len(shape_of(source))
    dims = dims_of(node, rank, default=list(range(rank))) or list(range(rank))
    if cut.dim in dims:
        if node.target not in PLUS:
            raise EndsError(f"it reduces over the parts and is no sum ({cut})")
        mean = node.target in _MEANS
        # The mean of chunk means is the mean only if chunks are equal.
        if mean and not has_equal(cut, shape_of(source), parts):
            raise EndsError("a mean of unequal parts is none of theirs")
        return InParts(SUM, {source: cut}, plus=PLUS[node.target], mean=mean)
    gone = 0 if argument(node, "keepdim") else sum(dim < cut.dim for dim in set(dims))
    return InParts(of_each_result(node, cut.moved(-gone)), {source: cut})


def along(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Sort, pick or accumulate along one dimension, in which the parts do not lie; shapes stay."""
    source, cut = cut_of(node, layouts)
    keeps_apart(cut, dims_of(node, len(shape_of(source)), default=-1))
    return InParts(of_each_result(node, cut), {source: cut})


def softmax(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Normalize along one dimension, in which the parts do not lie."""
    step = elementwise(node, layouts, parts)
    assert isinstance(step.out, Cut)
    keeps_apart(step.out, dims_of(node, len(shape_of(node))))
    return step


REDUCTION_RULES: dict[object, Rule] = {
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
