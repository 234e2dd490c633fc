"""Look-ups: parts lie along what is looked up, never along the table."""

from __future__ import annotations

import math

import torch
from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import aten, tensor
from inductor_passes.split.rules.rule import (
    SUM,
    Cut,
    EndsError,
    InParts,
    Layouts,
    Rule,
    cut_of,
    dims_of,
    keeps_apart,
    looked_up_by,
    shape_of,
    shared_cut,
    sizes,
    source_of,
)

# What adds to its first argument, for the parts of a sum.
ADDING = {
    target: target
    for target in (
        aten.index_put.default,
        aten._unsafe_index_put.default,
        aten.index_add.default,
        aten.scatter_add.default,
        aten._unsafe_masked_index_put_accumulate.default,
    )
}


def embedding(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Look up the rows of a part."""
    table, index = node.args[:2]
    assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
    cut = layouts.get(index)
    # Half a table cannot answer look-ups that may point anywhere in it.
    if table in layouts or not isinstance(cut, Cut):
        raise EndsError("its table lies in parts")
    return InParts(cut, {index: cut})


def embedding_backward(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Add the gradients of a table that parts of the look-ups make."""
    grad, index = node.args[:2]
    assert isinstance(grad, fx.Node) and isinstance(index, fx.Node)
    cut = layouts.get(grad, layouts.get(index))
    if not isinstance(cut, Cut) or cut.dim >= len(shape_of(index)):
        raise EndsError("its columns lie in parts")
    # The frequency is that of the whole batch: a chunk's gradient would be scaled by its own.
    if argument(node, "scale_grad_by_freq"):
        raise EndsError("it counts how often a row is looked up")
    return InParts(SUM, {grad: cut, index: cut})


def gather(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Pick or put elements along one dimension, in which the parts do not lie."""
    read = [source for source in node.all_input_nodes if sizes(source)]
    cut = shared_cut(layout for source, layout in layouts.items() if source in read)
    keeps_apart(cut, dims_of(node, len(sizes(node))))
    # ``gather`` may read fewer rows than its input has; row i of a chunk would then be another row
    # of the whole.
    if len({sizes(source)[cut.dim] for source in read}) > 1:
        raise EndsError("it picks fewer than there are, along the dimension of the parts")
    return InParts(cut, dict.fromkeys(read, cut))


def index(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Look up by one tensor of places along one dimension: parts lie along the look-ups, or
    along another dimension.
    """
    at, by = _looked_up_by(node)
    source = source_of(node)
    cut = layouts.get(by)
    if isinstance(cut, Cut):
        if source in layouts:
            raise EndsError("its table lies in parts")
        return InParts(cut.moved(at), {by: cut})
    _, cut = cut_of(node, layouts)
    keeps_apart(cut, [at])
    return InParts(_behind(cut, at, by), {source: cut})


def index_put(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Put or add values at places along one dimension: what is added at the places of a part
    adds to what parts before it made.
    """
    if (mask := _mask(node)) is not None:
        return _put_where(node, mask, layouts)
    at, by = _looked_up_by(node)
    into, values = source_of(node), argument(node, "values")
    assert isinstance(values, fx.Node)
    found = sizes(into)[:at] + sizes(by) + sizes(into)[at + 1 :]
    short = len(found) - len(sizes(values))
    cuts = set()  # along the dimensions of what a look-up at these places would find
    if isinstance(cut := layouts.get(by), Cut):
        cuts.add(cut.moved(at))
    if isinstance(cut := layouts.get(values), Cut):
        cuts.add(cut.moved(short))
    if isinstance(cut := layouts.get(into), Cut):
        keeps_apart(cut, [at])
        cuts.add(_behind(cut, at, by))
    cut = shared_cut(cuts)
    own = cut.moved(-short)
    reads = {values: own} if own.dim >= 0 and sizes(values)[own.dim] > 1 else {}
    if at <= cut.dim < at + len(sizes(by)):
        # Without adding, the last write wins. In which chunk that is depends on the indices.
        if not argument(node, "accumulate"):
            raise EndsError("a later part may put where an earlier one did")
        return InParts(SUM, {by: cut.moved(-at), **reads})
    cut = cut if cut.dim < at else cut.moved(1 - len(sizes(by)))
    return InParts(cut, {into: cut, **reads})


def _put_where(node: fx.Node, mask: fx.Node, layouts: Layouts) -> InParts:
    """Put one value where a mask says so, whose dimensions are the first."""
    into, values = source_of(node), argument(node, "values")
    assert isinstance(values, fx.Node)
    if math.prod(sizes(values)) != 1:
        raise EndsError("which of its values it puts where depends on what the mask holds")
    cut = shared_cut(layout for source, layout in layouts.items() if source in (into, mask))
    return InParts(cut, {into: cut, **({mask: cut} if cut.dim < len(sizes(mask)) else {})})


def masked_add(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Add values where a mask says so, at places along the first dimension: those of a part to
    what parts before it made.
    """
    into, mask, values = source_of(node), argument(node, "mask"), argument(node, "values")
    at, by = _looked_up_by(node)
    assert isinstance(mask, fx.Node) and isinstance(values, fx.Node)
    rank = len(sizes(by))
    cut = shared_cut(() if into in layouts else layouts.values())
    whole = sizes(values)
    unlike = whole != sizes(by) + sizes(into)[1:] or len(sizes(mask)) != len(whole)
    if at or cut.dim >= rank or unlike or sizes(mask)[cut.dim] != whole[cut.dim]:
        raise EndsError("its mask, places and values lie unlike one another")
    return InParts(SUM, {mask: cut, by: cut, values: cut})


def scatter_add(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Add along one dimension: in parts of it, one after another, or as ``gather`` along
    another.
    """
    into, by, values = source_of(node), argument(node, "index"), argument(node, "src")
    assert isinstance(by, fx.Node) and isinstance(values, fx.Node)
    cuts = {layouts.get(by), layouts.get(values)} - {None}
    (along,) = dims_of(node, len(sizes(by)))
    if into in layouts or not any(isinstance(c, Cut) and c.dim == along for c in cuts):
        return gather(node, layouts, parts)
    cut = shared_cut(cuts)
    if sizes(by) != sizes(values):
        raise EndsError("its inputs lie in unlike parts")
    return InParts(SUM, {by: cut, values: cut})


def _mask(node: fx.Node) -> fx.Node | None:
    """Return the mask that is looked up by, if it is one mask from the first dimension on."""
    indices = argument(node, "indices")
    assert isinstance(indices, (list, tuple))
    only = indices[0] if len(indices) == 1 else None
    found = tensor(only)
    is_mask = found is not None and found.dtype == torch.bool
    return only if isinstance(only, fx.Node) and is_mask else None


def _looked_up_by(node: fx.Node) -> tuple[int, fx.Node]:
    """Return the dimension that is looked up in, and by what."""
    several = "it looks up by several tensors, or by a mask"
    at, by = looked_up_by(argument(node, "indices"), several)
    found = tensor(by)
    if not isinstance(by, fx.Node) or found is None or found.dtype == torch.bool:
        raise EndsError(several)
    return at, by


def _behind(cut: Cut, at: int, by: fx.Node) -> Cut:
    """Return where a dimension of a table lies once dimension ``at`` has given way to those of
    the look-ups.
    """
    return cut if cut.dim < at else cut.moved(len(shape_of(by)) - 1)


RULES: dict[object, Rule] = {
    aten.index.Tensor: index,
    **dict.fromkeys((aten.index_put.default, aten._unsafe_index_put.default), index_put),
    aten.scatter_add.default: scatter_add,
    aten._unsafe_masked_index_put_accumulate.default: masked_add,
    aten.embedding.default: embedding,
    aten.embedding_dense_backward.default: embedding_backward,
    **dict.fromkeys((aten.gather.default, aten.scatter.value, aten.scatter.src), gather),
}
