"""The form of a rule: how a value lies in chunks, and how a node is computed in them.

A rank that follows may have other rows than the one that planned, or sizes that are symbols. Of
``n`` rows part ``i`` of ``k`` has those from ``n * i // k`` to ``n * (i + 1) // k``: the same on
every rank with as many rows, and ``n / k`` each where ``k`` divides ``n``.

The words are those of sharding, on a mesh dimension whose ranks run one after another: a value is a
shard (``Cut``), whole (no layout), or was a partial sum, whose parts are added where it is made
(``SUM``). Of routed tokens a part has rows in an order of its own, and addends of what is counted
(``rows.py``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, cast

import torch
from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import aten, prims, tensor
from inductor_passes.split.rules.rows import Addends, Condition, Routed
from inductor_passes.torch_compat.nodes import as_number, size_hint, surely_equal

Size = int | torch.SymInt
Shape = tuple[Size, ...]

# A ContextVar: some forty rules and helpers ask for shapes, none of which has another use for it.
_unequal: ContextVar[bool] = ContextVar("unequal_parts", default=False)


@contextlib.contextmanager
def unequal_parts() -> Iterator[None]:
    """Within it, parts may be unequal by a row, and sizes may be symbols."""
    token = _unequal.set(True)
    try:
        yield
    finally:
        _unequal.reset(token)


def may_be_unequal() -> bool:
    """Return whether this runs within ``unequal_parts``."""
    return _unequal.get()


def known(shape: Sequence[Size]) -> bool:
    """Return whether no size is a symbol."""
    return all(isinstance(size, int) for size in shape)


def quotient(size: Size, by: Size) -> Size | None:
    """Return ``size / by``; None unless it is surely whole."""
    if isinstance(by, int) and by < 1:
        return None
    found = as_number(size // by)
    return found if surely_equal(found * by, size) else None


def volume(shape: Sequence[Size]) -> Size:
    """Return the number of elements."""
    return as_number(math.prod(shape))


def is_broadcast(size: Size) -> bool:
    """Return whether a dimension of an operand is one element that all read."""
    return isinstance(size, int) and size == 1


@dataclass(frozen=True, slots=True)
class Cut:
    """Dimension ``dim`` is [outer, parts, inner]: each of ``outer`` blocks holds a piece of every
    part, in order.

    ``outer`` is 1 where the parts are consecutive; gathered values hold a block for each rank.
    """

    dim: int
    outer: int = 1

    def at(self, dim: int) -> Cut:
        """Return the same cut of another dimension."""
        return Cut(dim, self.outer)

    def moved(self, by: int) -> Cut:
        """Return the same cut, ``by`` dimensions further."""
        return self.at(self.dim + by)

    def __str__(self) -> str:
        return f"dimension {self.dim}" + (f" in {self.outer} blocks" if self.outer > 1 else "")


SUM: Final = "sum"  # or what else ``InParts.plus`` makes of parts
One = Cut | Routed | Addends | Condition
Layout = One | tuple[One | None, ...]  # a tuple where an operator has several results
Layouts = Mapping[fx.Node, Layout]


class SizeOf(Protocol):
    """What finds a size of the part that a part reads of an input."""

    def __call__(self, source: fx.Node, dim: int, by: int = 1, times: int = 1) -> object:
        """The size of dimension ``dim``, times ``times``, divided by ``by``: a number, or a node
        that makes it.
        """


@dataclass(frozen=True, slots=True)
class InParts:
    """Describe how one node is computed in chunks.

    ``out``: the layout of its value, or ``SUM``: chunks are added in order, and the value is whole.
    ``reads``: inputs that a chunk reads a chunk of; it reads the others whole. ``args``: arguments
    with the sizes of a chunk, where they change, or a callable that makes them from sizes of what a
    chunk reads.

    ``plus``: adds two chunks of a ``SUM``, elementwise. ``mean``: the value is the mean of the
    chunks, not the sum. ``make``: makes the results of all chunks, where they need different
    operators.

    ``rows``: how many rows each chunk has where its sizes do not say so; a check at run time holds
    it. ``once``: the value is whole, and the first chunk shows all that it takes of its inputs
    (``out`` is ``SUM``).
    """

    out: Layout | Literal["sum"]
    reads: Layouts = field(default_factory=dict)
    args: tuple[Any, ...] | Callable[[SizeOf], tuple[Any, ...]] | None = None
    plus: Any = aten.add.Tensor
    mean: bool = False
    make: Callable[[Maker], list[tuple[fx.Node, ...]]] | None = None
    rows: int | None = None
    once: bool = False


class Maker(Protocol):
    """What ``InParts.make`` has: the node, the number of parts, parts of what the node reads,
    and new nodes.
    """

    node: fx.Node
    count: int

    def parts(self, source: object) -> list[fx.Node]:
        """All parts of an argument."""

    def emit(
        self, target: object, args: tuple[object, ...], kwargs: Mapping[str, object] | None = None
    ) -> fx.Node:
        """Make a node."""

    def pick(self, several: fx.Node, index: int) -> fx.Node:
        """One of the results of a node."""


class EndsError(Exception):
    """A node that is not computed in parts: the region ends here. The text says why."""


def sizes(node: object) -> tuple[int, ...]:
    """Return the local shape of a node. Raises EndsError unless it is a tensor of known sizes."""
    found = shape_of(node)
    if not known(found):
        raise EndsError("its sizes are symbols, whose values other ranks may not share")
    return cast(tuple[int, ...], found)


def shape_of(node: object) -> Shape:
    """Return the local shape of a node, in which symbols may stand where a plan is followed.
    Raises EndsError as ``sizes``.
    """
    found = tensor(node)
    if found is None:
        raise EndsError("it is not one tensor")
    # The rank that decides needs numbers, or its choice would rest on hints that other ranks do not
    # have.
    if not may_be_unequal() and not known(found.shape):
        raise EndsError("its sizes are symbols, whose values other ranks may not share")
    return tuple(found.shape)


def fits(cut: Cut, shape: Shape, parts: int) -> bool:
    """Return whether a shape has ``parts`` parts along a cut, in each block, none of them empty."""
    rows = quotient(shape[cut.dim], cut.outer) if 0 <= cut.dim < len(shape) else None
    if rows is None:
        return False
    # A rank that follows a plan must accept what the planning rank accepted; its own rows may not
    # divide evenly.
    if may_be_unequal():
        return size_hint(rows) >= parts
    return isinstance(rows, int) and rows > 0 and rows % parts == 0


def has_equal(cut: Cut, shape: Shape, parts: int) -> bool:
    """Return whether the parts of a shape surely have the same size."""
    rows = quotient(shape[cut.dim], cut.outer)
    return isinstance(rows, int) and rows % parts == 0


def smaller(shape: Shape, dim: int, parts: int) -> list[Size]:
    """Return the shape of a part, one of several equal ones."""
    return [size // parts if i == dim else size for i, size in enumerate(shape)]


def is_tensor(node: fx.Node) -> bool:
    """Return whether the value of a node is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


# Node, layouts of its inputs that lie in parts, number of parts -> step; raises EndsError.
Rule = Callable[[fx.Node, Layouts, int], InParts]


def source_of(node: fx.Node) -> fx.Node:
    """Return the first argument, which must be a node."""
    first = node.args[0] if node.args else None
    if not isinstance(first, fx.Node):
        raise EndsError("its first argument is no value")
    return first


def cut_of(node: fx.Node, layouts: Layouts) -> tuple[fx.Node, Cut]:
    """Return the first argument, which must lie in parts, and its cut."""
    source = source_of(node)
    cut = layouts.get(source)
    if not isinstance(cut, Cut):
        raise EndsError("only values that it reads besides lie in parts")
    return source, cut


def lies_of(node: fx.Node, layouts: Layouts) -> tuple[fx.Node, Cut | Routed]:
    """Return the first argument, and in which parts it lies: cut, or rows in an order of theirs."""
    source = source_of(node)
    layout = layouts.get(source)
    if not isinstance(layout, (Cut, Routed)):
        what = "only values that it reads besides lie in parts"
        raise EndsError(what if layout is None else NO_ROWS)
    return source, layout


NO_ROWS = "it takes a count, or several values, for rows"


def shared_cut(layouts: Iterable[object]) -> Cut:
    """Return the cut that inputs share. Raises EndsError if they lie in unlike parts."""
    found = set(layouts)
    if len(found) != 1:
        raise EndsError("its inputs lie in unlike parts")
    (cut,) = found
    assert isinstance(cut, Cut)
    return cut


def of_each_result(node: fx.Node, layout: One) -> Layout:
    """Return the layout of a node whose results all lie so: one, or several."""
    made = node.meta.get("val")
    return (layout,) * len(made) if isinstance(made, (list, tuple)) else layout


def looked_up_by(listed: object, reason: str) -> tuple[int, object]:
    """Return the one index of a list that has None for the other dimensions, and its dimension.

    Raises EndsError with the reason if there are several.
    """
    assert isinstance(listed, (list, tuple))
    found = [(at, each) for at, each in enumerate(listed) if each is not None]
    if len(found) != 1:
        raise EndsError(reason)
    return found[0]


def dims_of(node: fx.Node, rank: int, name: str = "dim", default: object = None) -> list[int]:
    """Return an argument that names dimensions, each from 0 on."""
    given = argument(node, name)
    given = default if given is None else given
    listed = given if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(dim, int) for dim in listed):
        raise EndsError("it names its dimensions by values")
    return [dim % max(rank, 1) for dim in listed if isinstance(dim, int)]


def keeps_apart(cut: Cut, dims: list[int]) -> None:
    """Raise EndsError if an operator mixes what lies along ``dims``, and the parts lie along one
    of them.
    """
    if cut.dim in dims:
        raise EndsError(f"it mixes what the parts hold ({cut})")


def extents(node: object) -> tuple[Any, ...]:
    """Return the local shape of a node, symbols as expressions. Raises EndsError unless it is a
    tensor.
    """
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
    """Return the number that all elements of a value are; None if they are not all one that is
    known.
    """
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
