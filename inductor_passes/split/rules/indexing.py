"""Look-ups: parts lie along what is looked up, never along the table."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import aten
from inductor_passes.split.rules.places import SUM, Cut, EndsError, InParts, Place, sizes
from inductor_passes.split.rules.rule import Rule, dims_of, keeps_apart

Places = Mapping[fx.Node, Place]


def embedding(node: fx.Node, places: Places, parts: int) -> InParts:
    """Look up the rows of a part."""
    table, index = node.args[:2]
    assert isinstance(table, fx.Node) and isinstance(index, fx.Node)
    cut = places.get(index)
    if table in places or not isinstance(cut, Cut):
        raise EndsError("its table lies in parts")
    return InParts(cut, {index: cut})


def embedding_backward(node: fx.Node, places: Places, parts: int) -> InParts:
    """Add the gradients of a table that parts of the look-ups make."""
    grad, index = node.args[:2]
    assert isinstance(grad, fx.Node) and isinstance(index, fx.Node)
    cut = places.get(grad, places.get(index))
    if not isinstance(cut, Cut) or cut.dim >= len(sizes(index)):
        raise EndsError("its columns lie in parts")
    if argument(node, "scale_grad_by_freq"):
        raise EndsError("it counts how often a row is looked up")
    return InParts(SUM, {grad: cut, index: cut})


def gather(node: fx.Node, places: Places, parts: int) -> InParts:
    """Pick or put elements along one dimension, in which the parts do not lie."""
    read = [source for source in node.all_input_nodes if sizes(source)]
    cuts = {place for source, place in places.items() if source in read}
    if len(cuts) != 1:
        raise EndsError("its inputs lie in unlike parts")
    (cut,) = cuts
    assert isinstance(cut, Cut)
    keeps_apart(cut, dims_of(node, len(sizes(node))))
    if len({sizes(source)[cut.dim] for source in read}) > 1:
        raise EndsError("it picks fewer than there are, along the dimension of the parts")
    return InParts(cut, dict.fromkeys(read, cut))


RULES: dict[object, Rule] = {
    aten.embedding.default: embedding,
    aten.embedding_dense_backward.default: embedding_backward,
    **dict.fromkeys((aten.gather.default, aten.scatter.value, aten.scatter.src), gather),
}
