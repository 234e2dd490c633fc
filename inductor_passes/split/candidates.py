"""Find regions that could be cut: along each dimension of a value, as far as rules carry.

Regions begin at inputs of the graph. They also begin at inner values where other regions end:
results of operators that have no rule or need the whole value. Inner values with the same operator,
shape and dtype, as in the layers of a model, are cut the same way.

A value that is scattered or exchanged along its first dimension must hold, for each rank, a piece
of every chunk. So a value is also cut in as many blocks as such a group has ranks.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.graph.collectives import group_size, is_launch
from inductor_passes.graph.edit import tensor
from inductor_passes.split.price import BACKWARD, backward_of
from inductor_passes.split.region import Positions, Region, spread
from inductor_passes.split.rules.rule import Cut, EndsError, Shape, fits, shape_of

c10d = torch.ops._c10d_functional
_SHARING = (c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default)
INNER = 16  # kinds of values inside a graph that are looked at, those first in its order


@dataclass(frozen=True, slots=True)
class Way:
    """A way to cut a graph: from all values that are like ``seed`` (``like``), in ``parts`` parts.

    ``half``: only this half of a joint graph, or "".
    """

    seed: object
    cut: Cut
    parts: int
    half: str = ""


def like(node: fx.Node) -> object:
    """Return a key that values share if they are cut the same way; an input's key is its name."""
    if node.op == "placeholder":
        return str(node.target)
    source, at = node, None
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        source, at = node.args[0], node.args[1]
    value = tensor(node)
    shape = () if value is None else (tuple(map(str, value.shape)), value.dtype)
    return str(source.target), at, shape


class Laid:
    """Regions in one graph that share no node, as they are laid one after the other."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._positions = graph, Positions(graph)
        self._alike: dict[object, list[fx.Node]] = {}
        for node in graph.nodes:
            if sizes_of(node) is not None:
                self._alike.setdefault(like(node), []).append(node)
        self._late: frozenset[fx.Node] | None = None
        self.taken: set[fx.Node] = set()

    def lay(self, way: Way, keep: bool = True) -> list[Region]:
        """Return the regions of a way that hold a launch, beside those that are there; ``keep``:
        they are there too then.
        """
        found: list[Region] = []
        taken = self.taken if keep else set(self.taken)
        for seed in self._alike.get(way.seed, ()):
            region = None if seed in taken else self._spread(seed, way, taken)
            if region is not None and region.launches:
                found.append(region)
                taken.update(region.steps)
        return found

    def _spread(self, seed: fx.Node, way: Way, taken: Collection[fx.Node]) -> Region | None:
        shape = sizes_of(seed)
        if shape is None or not fits(way.cut, shape, way.parts):
            return None
        if not way.half:
            return spread(self._positions, seed, way.cut, way.parts, without=taken)
        if self._late is None:
            self._late = backward_of(self._graph)
        # It reads the other half in parts, but computes none of it.
        late = way.half == BACKWARD
        inside = {node for node in self._positions.of if (node in self._late) == late}
        own = {node for node in taken if node in inside}
        return spread(self._positions, seed, way.cut, way.parts, without=own).only(inside)


def lay(graph: fx.Graph, ways: Sequence[Way]) -> list[list[Region]]:
    """Return the regions of each way: none shares a node with another, and each has a launch."""
    laid_out = Laid(graph)
    return [laid_out.lay(way) for way in ways]


def regions(graph: fx.Graph, parts: int) -> Iterator[Region]:
    """Yield the regions that begin at inputs and hold a launch, inputs that are used first in
    front.

    An input that an earlier region reads in the same parts would lead to a piece of that region,
    and is left out.
    """
    yield from (region for region in from_inputs(graph, parts) if region.launches)


def from_inputs(graph: fx.Graph, parts: int) -> Iterator[Region]:
    """Yield the same with those that hold no launch, whose ends other regions may begin at."""
    positions = Positions(graph)
    inputs = [node for node in graph.find_nodes(op="placeholder") if node.users]
    # In the order of use and not of the signature: what the forward reads first leads the longest
    # region.
    inputs.sort(key=lambda node: min(positions.of[user] for user in node.users))
    blocks = _blocks(graph)
    known: set[tuple[fx.Node, object]] = set()
    for node in inputs:
        shape = sizes_of(node)
        for cut in _cuts(shape, blocks, parts):
            if (node, cut) in known:
                continue
            region = spread(positions, node, cut, parts)
            known.update(item for step in region.steps.values() for item in step.reads.items())
            yield region


def from_inside(
    graph: fx.Graph, parts: int, front: Iterable[Region], taken: Collection[fx.Node] = ()
) -> Iterator[Region]:
    """Yield the regions that begin where regions in ``front`` end, and that hold a launch.

    They hold no node that is ``taken``. Among values with equal ``like`` keys, the first that leads
    to a launch represents them all. Other regions may begin where the new ones end.
    """
    positions, blocks = Positions(graph), _blocks(graph)
    known: set[tuple[fx.Node, object]] = set()
    alike: dict[object, list[fx.Node]] = {}
    waiting: deque[object] = deque()

    def end(regions: Iterable[Region]) -> None:
        """Note where regions end."""
        ends: set[fx.Node] = set()
        for region in regions:
            known.update(item for step in region.steps.values() for item in step.reads.items())
            ends.update(region.ended)
        found = {value for node in ends for value in _values(node) if value not in taken}
        for value in sorted(found, key=positions.of.__getitem__):
            kind = like(value)
            if kind not in alike:
                waiting.append(kind)
            alike.setdefault(kind, []).append(value)

    end(front)
    for _ in range(INNER):
        if not waiting:
            return
        seeds = alike[waiting.popleft()]
        for cut in _cuts(sizes_of(seeds[0]), blocks, parts):
            for seed in seeds:
                if (seed, cut) in known:
                    continue
                region = spread(positions, seed, cut, parts, without=taken)
                end([region])
                if region.launches:
                    yield region
                    break


def sizes_of(node: fx.Node) -> Shape | None:
    """Return the local shape of a node; None unless it is one tensor of sizes that may be cut."""
    try:
        return shape_of(node)
    except EndsError:
        return None


def _cuts(shape: Shape | None, blocks: Sequence[int], parts: int) -> Iterator[Cut]:
    for cut in (Cut(dim, outer) for dim in range(len(shape or ())) for outer in blocks):
        if shape is not None and fits(cut, shape, parts):
            yield cut


def _values(node: fx.Node) -> list[fx.Node]:
    """Values of known sizes that an operator ends at: its own, its results', or what its launch
    brings.
    """
    several = isinstance(node.meta.get("val"), (list, tuple))
    found = list(node.users) if several or is_launch(node) else [node]
    return [value for value in found if sizes_of(value)]


def _blocks(graph: fx.Graph) -> list[int]:
    """In how many blocks inputs are cut: one, or one for each rank of a group that shares out
    rows.
    """
    found = {
        group_size(node) for node in graph.nodes if is_launch(node) and node.target in _SHARING
    }
    return [1, *sorted(size for size in found if size > 1)]
