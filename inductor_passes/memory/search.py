"""Choose what a training step keeps, so that it fits a budget and takes the least time.

A price of memory gives a choice (``min_cut.py``): the dearer a byte is, the more is computed or
gathered again. The search looks for the price whose choice is the largest one that fits, and adds
single values that still fit, the latest of the forward first: they live shortest. A few choices,
for collectives that are hidden or not, are scheduled as the graph will be, and the fastest wins.

A minimum cut knows how much is kept, and not when. Without a limit it would keep the first layer's
input and compute all others from it, each of which would live through the backward. So values that
alone connect what is before them with what is behind them are kept, or every second of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from inductor_passes.cost import CostModel
from inductor_passes.graph.aliasing import alias_source, is_view
from inductor_passes.graph.collectives import group_name, is_launch, is_wait, launches, tensor_bytes
from inductor_passes.graph.edit import CAST, PLACING
from inductor_passes.memory.liveness import Liveness
from inductor_passes.memory.min_cut import MinimumCut, Value, cheapest, completed
from inductor_passes.rewrite.bucket import GATHERED_FOR
from inductor_passes.rewrite.rematerialize import (
    Border,
    borders,
    may_repeat,
)
from inductor_passes.simulate.execution import live_bytes
from inductor_passes.torch_compat.nodes import is_random

COMPUTE = "compute"
PRICES = 10  # that are tried to find one, each time in the middle of what is left
# Choices that are scheduled: the share of the limit that they take, where the rest is left for what
# the scheduler gathers ahead of time; and the weight of a collective beside 1 for compute, because
# it may be hidden in part.
WAYS = ((1.0, 1.0), (0.9, 1.0), (0.75, 0.3), (0.75, 1.0), (0.6, 1.0))
STRIDES = (1, 2)  # of values that are kept between what runs again
# Of what lives between two places: what is twice as much is inside of a layer.
RISE = 2.0


@dataclass(frozen=True, slots=True)
class Crossing:
    """The values that one backward could read of the forward before it: nodes, and what each
    costs.
    """

    nodes: tuple[fx.Node, ...]
    values: tuple[Value, ...]


def crossing_of(
    border: Border, cost: CostModel, is_again: Callable[[fx.Node], bool | None]
) -> Crossing:
    """Return what may be kept at a border, at what cost.

    ``is_again``: whether a parameter is gathered again for the backward, by its gather; None where
    that is to be chosen.
    """
    nodes = tuple(node for node in border.forward if node.op == "call_function")
    place = {node: i for i, node in enumerate(nodes)}
    again: dict[fx.Node, bool | None] = {}  # of gathers that the backward reads itself
    given_up: set[fx.Node] = set()
    for node in nodes:
        if is_launch(node) and GATHERED_FOR in _custom(node) and may_repeat(node):
            derived = _derived(node)
            # Whether a gather runs again may not hang on what else does: ranks may differ in that.
            if any(user in border.backward for each in derived for user in each.users):
                again[node] = is_again(node)
                given_up.update(derived if again[node] else ())
    return Crossing(
        nodes,
        tuple(
            Value(
                sources=tuple(place[each] for each in node.all_input_nodes if each in place),
                bytes=None if node in given_up else _bytes_kept(border, node),
                us=_us_again(border, node, cost, again),
                read=any(user in border.backward for user in node.users),
            )
            for node in nodes
        ),
    )


def _derived(launch: fx.Node) -> list[fx.Node]:
    """The launch, and what only shows or converts its result."""
    found = [launch]
    for node in found:
        found += [user for user in node.users if is_wait(user) or user.target in _SHOWING]
    return found


_SHOWING = PLACING | {CAST, operator.getitem}


def _bytes_kept(border: Border, node: fx.Node) -> int | None:
    value, block = node.meta.get("val"), _checkpointed_block(node)
    if not isinstance(value, torch.Tensor) or is_launch(node) or is_view(node):
        return None  # a view keeps what it shows
    if block is not None and not _is_handed_on(border, node, block):
        return None
    # What lives through the backward in any case takes nothing more.
    return 0 if border.is_read_behind(node) else tensor_bytes(value)


def _us_again(
    border: Border, node: fx.Node, cost: CostModel, again: Mapping[fx.Node, bool | None]
) -> dict[str, float] | None:
    marked = node.meta.get("recompute")
    keeps = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
    if marked in keeps or is_random(node.target) or not isinstance(node.meta.get("val"), _TENSORS):
        return None
    block = _checkpointed_block(node)
    if block is not None and not is_view(node) and _is_handed_on(border, node, block):
        # Kept where it is needed: whether a block's launches run again may not hang on sizes.
        return None
    if is_launch(node):
        # Others than gathers run again where a checkpoint of the program says so.
        in_checkpoint = may_repeat(node) and GATHERED_FOR not in _custom(node)
        allowed = again.get(node, in_checkpoint)
        return None if allowed is False else {group_name(node): cost.launch_us(node)}
    return None if node.is_impure() and not is_wait(node) else {COMPUTE: cost.compute_us(node)}


_TENSORS = (torch.Tensor, tuple, list)


def _custom(node: fx.Node) -> Mapping[str, object]:
    return node.meta.get("custom") or {}


def _checkpointed_block(node: fx.Node) -> object:
    """Return which checkpointed block of the program computes a value again; None for none."""
    asked = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    if node.meta.get("recompute") not in asked or GATHERED_FOR in _custom(node):
        return None
    return node.meta.get("ac_graph_id", 0)


def _is_handed_on(border: Border, node: fx.Node, block: object) -> bool:
    """Return whether a forward reads a value outside of its checkpointed block."""
    return any(
        _checkpointed_block(user) != block
        or (
            (is_view(user) or user.target is operator.getitem)
            and _is_handed_on(border, user, block)
        )
        for user in node.users
        if user in border.forward
    )


def junctions(crossing: Crossing) -> list[list[int]]:
    """Return the places of values that connect two parts of a forward, by junction, in order.

    Between layers little is alive, and inside of them much more. Gathered parameters do not count.
    """
    nodes = crossing.nodes
    place = {node: i for i, node in enumerate(nodes)}
    last = list(range(len(nodes)))
    base = list(range(len(nodes)))
    for i, node in enumerate(nodes):
        source = alias_source(node)
        if source is not None and source in place and crossing.values[i].bytes is None:
            base[i] = base[place[source]]
        for each in node.all_input_nodes:
            if each in place:
                last[base[place[each]]] = i
    counts = [GATHERED_FOR not in _custom(node) for node in nodes]
    fresh = [(value.bytes or 0) if counts[i] else 0 for i, value in enumerate(crossing.values)]
    live = live_bytes(fresh, last)
    valleys = _valleys(live)
    # Two values side by side inside of a layer are lower than what is around them, too.
    lowest = [
        at
        for n, at in enumerate(valleys)
        if all(live[at] < RISE * live[each] for each in valleys[max(n - 1, 0) : n + 2])
    ]
    return [[i for i in range(at + 1) if fresh[i] and last[i] > at] for at in lowest]


def _valleys(live: Sequence[int]) -> list[int]:
    """Return where a curve is lowest between two places that are ``RISE`` times as high."""
    found: list[int] = []
    lowest, highest, falls = 0, 0, False
    for i, size in enumerate(live):
        if falls:
            if size <= live[lowest]:
                lowest = i
            elif size >= RISE * max(live[lowest], 1):
                found.append(lowest)
                falls, highest = False, i
        elif size > live[highest]:
            highest = i
        elif size * RISE <= live[highest]:
            falls, lowest = True, i
    return found


@dataclass(frozen=True, slots=True)
class Retention:
    """What each border keeps, the peak (bytes) in the program's order, the price (us a byte)."""

    cuts: tuple[MinimumCut, ...]
    peak_bytes: int
    byte_us: float

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept at all borders together."""
        return sum(cut.bytes for cut in self.cuts)


class RetentionSearch:
    """Find choices for one graph with marked phases that fit into ``limit_bytes`` of values.

    ``gathered_again``: which of the graph's launches run again, by number; None where that is to be
    chosen.
    """

    def __init__(
        self,
        graph: fx.Graph,
        cost: CostModel,
        limit_bytes: int,
        gathered_again: Collection[int] | None = None,
    ) -> None:
        self.limit_bytes = limit_bytes
        # A backward reads what is kept, where it may have what runs again in a kernel of its own.
        self.read_us = 1 / cost.copy_bytes_per_us
        self.borders = [border for border in borders(graph) if border.is_crossed]
        self.number = {launch: i for i, launch in enumerate(launches(graph))}

        def is_again(launch: fx.Node) -> bool | None:
            return None if gathered_again is None else self.number[launch] in gathered_again

        self.crossings = [crossing_of(each, cost, is_again) for each in self.borders]
        self.liveness = Liveness(graph, self.borders)
        self.junctions = [junctions(each) for each in self.crossings]
        self.channels = sorted(
            {name for each in self.crossings for value in each.values for name in value.us or ()}
        )

    def choices(self) -> Iterator[Retention]:
        """Yield choices to schedule: the largest that fits of each weight and stride."""
        everything = self._choice(1, self._weights(1.0), 0.0)
        if everything.peak_bytes <= self.limit_bytes:
            yield everything
            if everything.peak_bytes <= WAYS[-1][0] * self.limit_bytes:
                return
        for stride in STRIDES:
            for share, link in WAYS:
                limit = int(share * self.limit_bytes)
                yield (found := self._largest(stride, self._weights(link), limit))
            if found.peak_bytes <= limit:
                return

    def _weights(self, link: float) -> dict[str, float]:
        return {name: 1.0 if name == COMPUTE else link for name in self.channels}

    def _largest(self, stride: int, weights: Mapping[str, float], limit: int) -> Retention:
        """Return the largest choice that fits at any price, or the leanest if none fits."""
        # At this price a microsecond buys no byte.
        dear = 1.0 + sum(
            sum((value.us or {}).values()) for each in self.crossings for value in each.values
        )
        lean = self._choice(stride, weights, dear)
        if lean.peak_bytes > limit:
            return lean
        low, high = 1e-12, dear
        rich = self._choice(stride, weights, 0.0)
        for _ in range(PRICES):
            middle = (low * high) ** 0.5
            tried = self._choice(stride, weights, middle)
            if tried.peak_bytes <= limit:
                lean, high = tried, middle
            else:
                rich, low = tried, middle
            if lean.cuts == rich.cuts:
                break
        return self._filled(lean, rich, limit)

    def _choice(self, stride: int, weights: Mapping[str, float], byte_us: float) -> Retention:
        cuts = []
        for crossing, found in zip(self.crossings, self.junctions, strict=True):
            values = list(crossing.values)
            for at in (i for alive in found[::stride] for i in alive):
                values[at] = replace(values[at], us=None)
            cut = cheapest(values, weights, byte_us + self.read_us)
            cuts.append(completed(crossing.values, cut.kept))
        return self.priced(tuple(cuts), byte_us)

    def _filled(self, lean: Retention, rich: Retention, limit: int) -> Retention:
        """Add to a choice what still fits of what another one keeps, the latest values first."""
        more = [
            (number, i)
            for number, (less, most) in enumerate(zip(lean.cuts, rich.cuts, strict=True))
            for i in sorted(most.kept - less.kept, reverse=True)
        ]

        def with_first(count: int) -> Retention:
            added = set(more[:count])
            cuts = []
            for number, cut in enumerate(lean.cuts):
                kept = {*cut.kept, *(i for border, i in added if border == number)}
                cuts.append(completed(self.crossings[number].values, kept))
            return self.priced(tuple(cuts), lean.byte_us)

        best, low, high = lean, 0, len(more)
        while low < high:
            middle = (low + high + 1) // 2
            tried = with_first(middle)
            if tried.peak_bytes <= limit:
                best, low = tried, middle
            else:
                high = middle - 1
        return best

    def priced(self, cuts: tuple[MinimumCut, ...], byte_us: float) -> Retention:
        """Return a choice of what each border keeps, with its peak."""
        again = {
            self.liveness.place[crossing.nodes[i]]
            for crossing, cut in zip(self.crossings, cuts, strict=True)
            for i in cut.again
        }
        return Retention(cuts, max(self.liveness.bytes_over_time(again)), byte_us)

    def least_again_us(self) -> float:
        """Return the least time of compute that runs again in any choice that fits.

        What is kept at a border is alive there at once, and takes no more than there is. A minimum
        cut at any price of memory, minus what all memory costs, is no more than that least.
        """
        weights = {name: float(name == COMPUTE) for name in self.channels}
        total = 0.0
        for crossing in self.crossings:
            found = [0.0]
            price = 2.0**-40
            while price <= 1.0:
                worth = cheapest(crossing.values, weights, price).worth(weights, price)
                found.append(worth - price * self.limit_bytes)
                price *= 2
            total += max(found)
        return total

    def gathers_again(self, choice: Retention) -> list[int]:
        """Return the numbers of the launches that run again."""
        _, again = self.marks(choice)
        return sorted(self.number[node] for node in again if node in self.number)

    def marks(self, choice: Retention) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the nodes that a choice keeps, and those that run again."""
        pairs = list(zip(self.crossings, choice.cuts, strict=True))
        kept = [crossing.nodes[i] for crossing, cut in pairs for i in sorted(cut.kept)]
        again = [crossing.nodes[i] for crossing, cut in pairs for i in sorted(cut.again)]
        return kept, again
