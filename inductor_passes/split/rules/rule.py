"""The form of a rule, and what rules ask of a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import fx

from inductor_passes.graph.collectives import argument
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
