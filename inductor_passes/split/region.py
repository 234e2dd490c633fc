"""How far a cut reaches: from one value that is read in parts to the operators that end it."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import fx

from inductor_passes.graph.collectives import is_launch, is_wait, loose_users, waits_of
from inductor_passes.split.rules import step_of
from inductor_passes.split.rules.counting import keys_of
from inductor_passes.split.rules.routing import SORTS
from inductor_passes.split.rules.rows import Addends, Routed
from inductor_passes.split.rules.rule import Cut, EndsError, InParts, Layout, Layouts


@dataclass(slots=True)
class Region:
    """Hold the nodes that are computed in ``parts``, how each is, and why the region ends.

    ``seed`` is a value that is read in chunks. ``ended`` maps each operator that reads a value of
    the region whole to the reason. The region goes on after such an operator if a result has the
    shape of a value that the operator received in chunks. ``left`` maps every reader of the region
    that is not in chunks to the reason.
    """

    seed: fx.Node
    cut: Cut
    parts: int
    steps: dict[fx.Node, InParts] = field(default_factory=dict)
    layouts: dict[fx.Node, Layout] = field(default_factory=dict)
    ended: dict[fx.Node, str] = field(default_factory=dict)
    left: dict[fx.Node, str] = field(default_factory=dict)

    @property
    def launches(self) -> dict[fx.Node, str]:
        """Launches in parts, and how what each of them sends is cut: one way, or several if it
        sends several tensors.
        """
        return {
            node: ", ".join(dict.fromkeys(map(str, step.reads.values())))
            for node, step in self.steps.items()
            if is_launch(node)
        }

    def only(self, nodes: Collection[fx.Node]) -> Region:
        """Return the piece of the region that is among ``nodes``; one without steps, if rows
        that no join makes cross its edge.
        """
        steps = {node: step for node, step in self.steps.items() if node in nodes}
        # Rows in an order of their own cannot cross the edge: half of a routed part is worth
        # nothing.
        if any(
            _keys(self.layouts.get(source)) is not None and (source in steps) != (node in steps)
            for node in self.steps
            for source in node.all_input_nodes
        ):
            steps = {}
        ended = {node: why for node, why in self.ended.items() if node in nodes}
        return replace(self, steps=steps, ended=ended)

    def lean(self) -> Region:
        """Return what of the region its launches need, and their waits."""
        needed = set(self.launches)
        # Steps are in graph order: backwards, one pass collects all that launches need, directly or
        # not.
        for node in reversed(self.steps):
            if node in needed:
                needed.update(node.all_input_nodes)
        waits = {user for launch in self.launches for user in launch.users}
        # Results of a coalesced launch are waited for one by one, behind a ``getitem``.
        waits |= {user for wait in waits for user in wait.users if is_wait(user)}
        made = self.only(needed | waits)
        return replace(made, ended=self.ended) if made.steps else self

    def again(self, positions: Positions, wholes: Mapping[fx.Node, fx.Node]) -> Region:
        """Return the same region, once others were written into the graph. ``wholes``: what is
        now read in place of their nodes.
        """
        was = {now: node for node, now in wholes.items()}
        edge: dict[fx.Node, Layout] = {}  # what is read in parts, and computed whole
        for source in (source for node in self.steps for source in node.all_input_nodes):
            node = was.get(source, source)
            if node in self.layouts and node not in self.steps:
                edge[source] = self.layouts[node]
        seed = wholes.get(self.seed, self.seed)
        made = spread(positions, seed, self.cut, self.parts, within=self.steps, edge=edge)
        made.ended = self.ended
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
    edge: Layouts | None = None,
) -> Region:
    """Compute everything downstream of ``seed`` in chunks, as far as rules allow.

    ``launches``: only these are cut. ``within``: only these nodes are computed in chunks.
    ``without``: these are not. ``edge``: values that are read in chunks, instead of the seed.

    The search visits only nodes downstream of the seed, so that a seed that leads nowhere costs
    nothing. An operator may want the whole of rows that each chunk holds in its own order, and no
    join makes that. Then the sort that led there stays whole, and the region ends at the sort
    instead of the operator.
    """
    whole: dict[fx.Node, str] = {}
    while True:
        region = _spread(positions, seed, cut, parts, launches, within, whole, without, edge)
        found = _wanted_whole(region)
        if not found:
            return region
        if found.keys() <= whole.keys():  # never seen: that would go on for ever
            return Region(seed, cut, parts)
        whole.update(found)


def _spread(
    positions: Positions,
    seed: fx.Node,
    cut: Cut,
    parts: int,
    launches: Collection[fx.Node] | None,
    within: Collection[fx.Node] | None,
    whole: Mapping[fx.Node, str],
    without: Collection[fx.Node],
    edge: Layouts | None,
) -> Region:
    """Compute the nodes downstream of ``seed`` in chunks.

    ``whole`` maps keys that are sorted and counted whole to the reason.
    """
    region = Region(seed, cut, parts)
    queue: list[tuple[int, fx.Node]] = []
    seen: set[fx.Node] = set()

    def set_layout(node: fx.Node, layout: Layout) -> None:
        region.layouts[node] = layout
        for user in node.users:
            if user not in seen:
                seen.add(user)
                # In graph order, so that all inputs of a node have their layouts before it.
                heapq.heappush(queue, (positions.of[user], user))

    for node, layout in ({seed: cut} if edge is None else edge).items():
        set_layout(node, layout)
    while queue:
        _, node = heapq.heappop(queue)
        if node in without or (within is not None and node not in within):
            region.left[node] = "it is not to be in parts"
            continue
        near = {n: region.layouts[n] for n in node.all_input_nodes if n in region.layouts}
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source not in region.steps:
            lies = region.layouts[source]  # one of several results of what was computed whole
            if isinstance(lies, tuple) and (one := lies[cast(int, node.args[1])]) is not None:
                set_layout(node, one)
            continue
        try:
            if launches is not None and is_launch(node) and node not in launches:
                raise EndsError("it is left whole")
            # Without a wait in this graph nobody could say when the chunks of its result have
            # arrived.
            if is_launch(node) and not _is_waited_for(node):
                raise EndsError("nothing in this graph waits for it")
            step = step_of(node, near, parts, whole)
        except EndsError as error:
            region.left[node] = str(error)
            if node.op != "output":
                region.ended[node] = _why(node, whole) or str(error)
                # The operator itself runs whole, but what reads its result may be computed in
                # chunks again: a norm over the cut dimension between two products.
                if (again := _behind(node, near)) is not None:
                    set_layout(node, again)
            continue
        region.steps[node] = step
        if step.out != "sum":
            set_layout(node, step.out)
    return region


def _is_waited_for(launch: fx.Node) -> bool:
    """Return whether the result of a launch is read after a wait, and nowhere else."""
    return bool(waits_of(launch)) and not loose_users(launch)


def _why(node: fx.Node, whole: Mapping[fx.Node, str]) -> str:
    """Return why a sort is whole, if it is."""
    source = node.args[0] if node.args else None
    sorts = node.target in SORTS and isinstance(source, fx.Node)
    return whole.get(keys_of(source), "") if sorts and isinstance(source, fx.Node) else ""


def _wanted_whole(region: Region) -> dict[fx.Node, str]:
    """Return the keys by which tokens cannot be sorted in chunks, and the reason for each.

    Either a node reads rows that no join makes, or nothing in their order is exchanged.
    """
    found: dict[fx.Node, str] = {}
    for node, reason in region.left.items():
        for source in node.all_input_nodes:
            if (keys := _keys(region.layouts.get(source))) is not None:
                what = "it is returned" if node.op == "output" else f"%{node.name}: {reason}"
                found.setdefault(keys, f"its order is read whole ({what})")
    for node, step in region.steps.items():
        for source in node.all_input_nodes:
            keys = _keys(region.layouts.get(source))
            # A rule that leaves an input out of ``reads`` wants it whole. With arguments of its own
            # it may not read that input at all.
            if keys is not None and source not in step.reads and step.args is None:
                found.setdefault(keys, f"its order is read whole (%{node.name})")
    if found:
        return found
    counted: dict[fx.Node, None] = {}
    sent = set()
    for node, step in region.steps.items():
        for layout in step.reads.values() if is_launch(node) else ():
            if isinstance(layout, Routed):
                # Counts alone are not worth it: splitting the sort pays only if rows in its order
                # are exchanged, chunk by chunk.
                sent.add(layout.keys)
            elif isinstance(layout, Addends) and layout.keys is not None:
                counted[layout.keys] = None
    return {keys: "no rows in its order are exchanged" for keys in counted if keys not in sent}


def _keys(layout: Layout | None) -> fx.Node | None:
    """Return the keys of the sort that a layout depends on, if no join makes its value whole."""
    if isinstance(layout, tuple):
        return next((keys for one in layout if (keys := _keys(one)) is not None), None)
    if isinstance(layout, Addends) and not layout.joins:
        return layout.keys
    return layout.keys if isinstance(layout, Routed) else None


def _behind(node: fx.Node, near: dict[fx.Node, Layout]) -> Layout | None:
    """How a result that was computed whole is read in parts again: like an input of its shape."""
    if is_launch(node) or node.op != "call_function":
        return None
    shapes: dict[tuple[int, ...], Cut] = {}
    for source, cut in near.items():
        shape = _static_shape(source.meta.get("val"))
        if isinstance(cut, Cut) and shape is not None:
            # By shape: an operator without a rule gives no better hint of which dimension is which.
            shapes[shape] = cut
    made = node.meta.get("val")
    if isinstance(made, (list, tuple)):
        found = tuple(shapes.get(_static_shape(each) or ()) for each in made)
        return found if any(found) else None
    return shapes.get(_static_shape(made) or ())


def _static_shape(value: object) -> tuple[int, ...] | None:
    """The shape of a tensor that holds no symbol."""
    if not isinstance(value, torch.Tensor):
        return None
    known = all(isinstance(size, int) for size in value.shape)
    return tuple(map(int, value.shape)) if known else None
