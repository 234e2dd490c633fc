"""How far a cut reaches: from one value that is read in parts to the operators that end it."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import fx

from inductor_passes.graph.collectives import is_launch, is_wait
from inductor_passes.split.rules import step_of
from inductor_passes.split.rules.places import Cut, EndsError, InParts, Place


@dataclass(slots=True)
class Region:
    """Nodes that are computed in ``parts``, how each is, and why it ends where it does.

    ``seed`` is a value that is read in parts. ``ended``: what reads a value of the region whole, with the reason;
    behind such an operator the region goes on where a result has the shape of a value that it was given in parts.
    ``of``: what its parts are of, in words that end how they lie.
    """

    seed: fx.Node
    cut: Cut
    parts: int
    steps: dict[fx.Node, InParts] = field(default_factory=dict)
    places: dict[fx.Node, Place] = field(default_factory=dict)
    ended: dict[fx.Node, str] = field(default_factory=dict)
    of: str = ""

    @property
    def launches(self) -> dict[fx.Node, str]:
        """Launches in parts, and how what each of them sends is cut: one way, or several if it sends several tensors."""
        return {
            node: ", ".join(dict.fromkeys(map(str, step.reads.values())))
            for node, step in self.steps.items()
            if is_launch(node)
        }

    def only(self, nodes: Collection[fx.Node]) -> Region:
        """Return the piece of the region that is among ``nodes``."""
        steps = {node: step for node, step in self.steps.items() if node in nodes}
        ended = {node: why for node, why in self.ended.items() if node in nodes}
        return replace(self, steps=steps, ended=ended)

    def lean(self) -> Region:
        """Return what of the region its launches need, and their waits."""
        needed = set(self.launches)
        for node in reversed(self.steps):
            if node in needed:
                needed.update(node.all_input_nodes)
        waits = {user for launch in self.launches for user in launch.users}
        waits |= {user for wait in waits for user in wait.users if is_wait(user)}
        return replace(self.only(needed | waits), ended=self.ended)

    def again(self, positions: Positions, wholes: Mapping[fx.Node, fx.Node]) -> Region:
        """Return the same region, once others were written into the graph. ``wholes``: what is now read in place of their nodes."""
        was = {now: node for node, now in wholes.items()}
        edge: dict[fx.Node, Place] = {}  # what is read in parts, and computed whole
        for source in (source for node in self.steps for source in node.all_input_nodes):
            node = was.get(source, source)
            if node in self.places and node not in self.steps:
                edge[source] = self.places[node]
        seed = wholes.get(self.seed, self.seed)
        made = spread(positions, seed, self.cut, self.parts, within=self.steps, edge=edge)
        made.ended, made.of = self.ended, self.of
        return made


class Positions:
    """Places of a graph's nodes in its order, read once for many regions."""

    def __init__(self, graph: fx.Graph) -> None:
        self.of = {node: i for i, node in enumerate(graph.nodes)}


def spread(
    positions: Positions,
    seed: fx.Node,
    cut: Cut,
    parts: int,
    launches: Collection[fx.Node] | None = None,
    within: Collection[fx.Node] | None = None,
    *,
    without: Collection[fx.Node] = (),
    edge: Mapping[fx.Node, Place] | None = None,
) -> Region:
    """Compute everything behind ``seed`` in parts as far as rules allow; ``launches``: only these are cut; ``within``: only
    these nodes are computed in parts, and those ``without`` are not. ``edge``: values that are read in parts, in place of the seed.

    Looks at nothing but what is behind the seed, so that a seed that leads nowhere costs nothing.
    """
    region = Region(seed, cut, parts)
    queue: list[tuple[int, fx.Node]] = []
    seen: set[fx.Node] = set()

    def lie(node: fx.Node, place: Place) -> None:
        region.places[node] = place
        for user in node.users:
            if user not in seen:
                seen.add(user)
                heapq.heappush(queue, (positions.of[user], user))

    for node, place in ({seed: cut} if edge is None else edge).items():
        lie(node, place)
    while queue:
        _, node = heapq.heappop(queue)
        if node in without or (within is not None and node not in within):
            continue
        near = {n: region.places[n] for n in node.all_input_nodes if n in region.places}
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source not in region.steps:
            lies = region.places[source]  # one of several results of what was computed whole
            if isinstance(lies, tuple) and (one := lies[cast(int, node.args[1])]) is not None:
                lie(node, one)
            continue
        try:
            if launches is not None and is_launch(node) and node not in launches:
                raise EndsError("it is left whole")
            step = step_of(node, near, parts)
        except EndsError as error:
            if node.op != "output":
                region.ended[node] = str(error)
                if (again := _behind(node, near)) is not None:
                    lie(node, again)
            continue
        region.steps[node] = step
        if step.out != "sum":
            lie(node, step.out)
    return region


def _behind(node: fx.Node, near: dict[fx.Node, Place]) -> Place | None:
    """How a result that was computed whole is read in parts again: like an input of its shape."""
    if is_launch(node) or node.op != "call_function":
        return None
    shapes = {
        tuple(source.meta["val"].shape): cut
        for source, cut in near.items()
        if isinstance(cut, Cut) and isinstance(source.meta.get("val"), torch.Tensor)
    }
    made = node.meta.get("val")
    if isinstance(made, (list, tuple)):
        found = tuple(
            shapes.get(tuple(each.shape)) if isinstance(each, torch.Tensor) else None
            for each in made
        )
        return found if any(found) else None
    return shapes.get(tuple(made.shape)) if isinstance(made, torch.Tensor) else None
