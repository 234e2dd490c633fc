"""How a value lies in parts, and how a node is computed in them.

The words are those of sharding, on a mesh dimension whose ranks run one after another: a value is a shard (``Cut``),
whole (no place), or was a partial sum, whose parts are added where it is made (``SUM``). Of routed tokens a part has
rows in an order of its own, and addends of what is counted (``rows.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol, cast

import torch
from torch import fx

from inductor_passes.graph.edit import aten, tensor
from inductor_passes.split.rules.pieces import (
    Shape,
    Size,
    are_equal,
    has_pieces,
    known,
    may_be_unequal,
    quotient,
)
from inductor_passes.split.rules.rows import Addends, Condition, Routed


@dataclass(frozen=True, slots=True)
class Cut:
    """Dimension ``dim`` is [outer, parts, inner]: each of ``outer`` blocks holds a piece of every part, in order.

    ``outer`` is 1 where the parts are consecutive; gathered values hold a block for each rank.
    """

    dim: int
    outer: int = 1

    def moved(self, by: int) -> Cut:
        """Return the same cut, ``by`` dimensions further."""
        return Cut(self.dim + by, self.outer)

    def __str__(self) -> str:
        return f"dimension {self.dim}" + (f" in {self.outer} blocks" if self.outer > 1 else "")


SUM: Final = "sum"  # or what else ``InParts.plus`` makes of parts
One = Cut | Routed | Addends | Condition
Place = One | tuple[One | None, ...]  # a tuple where an operator has several results


class SizeOf(Protocol):
    """What finds a size of the part that a part reads of an input."""

    def __call__(self, source: fx.Node, dim: int, by: int = 1, times: int = 1) -> object:
        """The size of dimension ``dim``, times ``times``, divided by ``by``: a number, or a node that makes it."""


@dataclass(frozen=True, slots=True)
class InParts:
    """How one node is computed in parts.

    ``out``: how its value lies then, or ``SUM``: parts are added, in order, and the value is whole. ``reads``: inputs
    that a part reads a part of; the others it reads whole. ``args``: arguments with the sizes of a part, where they
    are not as they were, or what makes them of sizes of what a part reads. ``plus``: what adds two parts of a ``SUM``, elementwise. ``mean``: of which the parts' mean is
    wanted, not the sum. ``make``: makes the results of all parts itself, where they are not of the same operators.
    ``rows``: how many rows each part has where its sizes do not say so; that is checked when it runs. ``once``: the value
    is whole, and the first part shows all that it takes of its inputs (``out`` is ``SUM``).
    """

    out: Place | Literal["sum"]
    reads: Mapping[fx.Node, One] = field(default_factory=dict)
    args: tuple[Any, ...] | Callable[[SizeOf], tuple[Any, ...]] | None = None
    plus: Any = aten.add.Tensor
    mean: bool = False
    make: Callable[[Maker], list[tuple[fx.Node, ...]]] | None = None
    rows: int | None = None
    once: bool = False


class Maker(Protocol):
    """What ``InParts.make`` has: the node, the number of parts, parts of what the node reads, and new nodes."""

    node: fx.Node
    count: int

    def parts(self, source: object) -> list[fx.Node]:
        """All parts of an argument."""

    def emit(
        self, target: object, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
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
    """Return the local shape of a node, in which symbols may stand where a plan is followed. Raises EndsError as ``sizes``."""
    found = tensor(node)
    if found is None:
        raise EndsError("it is not one tensor")
    if not may_be_unequal() and not known(found.shape):
        raise EndsError("its sizes are symbols, whose values other ranks may not share")
    return tuple(found.shape)


def fits(cut: Cut, shape: Shape, parts: int) -> bool:
    """Return whether a shape has ``parts`` parts along a cut, as ``pieces`` says."""
    return has_pieces(cut.dim, cut.outer, shape, parts)


def has_equal(cut: Cut, shape: Shape, parts: int) -> bool:
    """Return whether the parts of a shape surely have the same size."""
    rows = quotient(shape[cut.dim], cut.outer)
    return rows is not None and are_equal(rows, parts)


def smaller(shape: Shape, dim: int, parts: int) -> list[Size]:
    """Return the shape of a part, one of several equal ones."""
    return [size // parts if i == dim else size for i, size in enumerate(shape)]


def is_tensor(node: fx.Node) -> bool:
    """Return whether the value of a node is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)
