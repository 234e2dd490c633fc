"""Choose what a training step keeps, so that it fits a budget and takes the least time.

A price of memory gives a choice (``min_cut.py``): the dearer a byte is, the more is computed or
gathered again. The search looks for the price whose choice is the largest one that fits, and adds
single values that still fit, the latest of the forward first: they live shortest. A few choices,
for collectives that are hidden or not, are scheduled as the graph will be, beside what upstream's
partition would keep without a budget, and the fastest wins.

Where values may be moved to the host's memory, those that are kept longest are, the earliest of the
forward, and what the optimizer keeps between steps, as far as a share of the step's compute hides
the copies.

A minimum cut knows how much is kept, and not when. Without a limit it would keep the first layer's
input and compute all others from it, each of which would live through the backward. So values that
alone connect what is before them with what is behind them are kept, or every second of them.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from inductor_passes.cost import CostModel
from inductor_passes.cost.model import host_bytes_per_us
from inductor_passes.graph.aliasing import alias_source, is_view, main_result
from inductor_passes.graph.collectives import (
    group_name,
    is_launch,
    is_wait,
    launches,
    output_bytes,
    tensor_bytes,
)
from inductor_passes.graph.edit import CAST, PLACING
from inductor_passes.memory.host_copies import SMALLEST_MOVED, State, Timetable, states_of
from inductor_passes.memory.liveness import Liveness
from inductor_passes.memory.min_cut import MinimumCut, Value, cheapest, completed
from inductor_passes.rewrite.bucket import GATHERED_FOR
from inductor_passes.rewrite.rematerialize import (
    Border,
    borders,
    kept_by_partition,
    may_repeat,
)
from inductor_passes.simulate.execution import live_bytes
from inductor_passes.torch_compat.nodes import is_impure, is_random

COMPUTE = "compute"
PRICES = 10  # that are tried to find one, each time in the middle of what is left
STRIDES = (1, 2)  # of values that are kept between what runs again
SKIPPED = 6  # values that are passed over because they do not fit, where later ones may


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How a choice is looked for.

    ``share``: of the limit that it takes; the rest is left for what the scheduler gathers ahead of
    time. ``link``: what a collective that runs again weighs beside 1 for compute, because it may be
    hidden in part. ``host``, ``states``: shares of the time of compute for copies to the host and
    back, of values and of states.
    """

    share: float = 1.0
    link: float = 1.0
    stride: int = 1
    host: float = 0.0
    states: float = 0.0


ON_DEVICE = (
    SearchSettings(),
    SearchSettings(0.9),
    SearchSettings(0.75, 0.3),
    SearchSettings(0.75),
    SearchSettings(0.6),
)
OVER_HOST = (
    SearchSettings(host=0.5),
    SearchSettings(0.9, host=0.9),
    SearchSettings(states=0.5),
    SearchSettings(0.9, states=0.9),
    SearchSettings(0.9, host=0.4, states=0.5),
)
# Of the limit, and of compute for copies of states, where upstream's partition is kept.
PARTITION_SHARE = 0.9
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
    values = []
    for node in nodes:
        size = None if node in given_up else _bytes_kept(border, node)
        us = _us_again(border, node, cost, again)
        read = any(user in border.backward for user in node.users)
        if read and us is None and size is None:
            size = output_bytes(node)  # no choice: a collective that the backward awaits
        sources = tuple(place[each] for each in node.all_input_nodes if each in place)
        values.append(Value(sources, size, us, read))
    return Crossing(nodes, tuple(values))


def _may_move(crossing: Crossing, i: int) -> bool:
    node, size = crossing.nodes[i], crossing.values[i].bytes
    is_fresh = alias_source(node) is None or _is_main_result(node)
    returned = any(user.op == "output" for user in node.users)
    return size is not None and size >= SMALLEST_MOVED and is_fresh and not returned


def _is_main_result(node: fx.Node) -> bool:
    return node.target is operator.getitem and main_result(node.args[0]) == node.args[1]


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
    if marked in keeps or is_random(node) or not isinstance(node.meta.get("val"), _TENSORS):
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
    return None if is_impure(node) and not is_wait(node) else {COMPUTE: cost.compute_us(node)}


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
    """What each border keeps, on the device or the host, the peak (bytes) in the program's order,
    the price (us a byte).
    """

    cuts: tuple[MinimumCut, ...]
    peak_bytes: int
    byte_us: float
    moved: tuple[tuple[int, int], ...] = ()  # border and place of what is kept on the host
    states: int = 0  # how many of the states wait there, the first ones

    @property
    def kept_bytes(self) -> int:
        """Bytes that are kept at all borders together."""
        return sum(cut.bytes for cut in self.cuts)


Choose = Callable[[], Retention]


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
        *,
        may_move: bool = False,
        may_release: bool = False,
    ) -> None:
        self.limit_bytes = limit_bytes
        self.host_bytes_per_us = host_bytes_per_us(cost) if may_move else 0.0
        self.compute_us = sum(cost.compute_us(node) for node in graph.nodes)
        # A backward reads what is kept, where it may have what runs again in a kernel of its own.
        self.read_us = 1 / cost.copy_bytes_per_us
        self.borders = [border for border in borders(graph) if border.is_crossed]
        self.number = {launch: i for i, launch in enumerate(launches(graph))}

        def is_again(launch: fx.Node) -> bool | None:
            return None if gathered_again is None else self.number[launch] in gathered_again

        self.crossings = [crossing_of(each, cost, is_again) for each in self.borders]
        self.liveness = Liveness(graph, self.borders)
        self.movable = [
            (number, i)
            for number, crossing in enumerate(self.crossings)
            for i in range(len(crossing.nodes) if self.host_bytes_per_us else 0)
            if _may_move(crossing, i)
        ]
        self.states: list[State] = []
        if may_release and self.host_bytes_per_us:
            self.states = states_of(graph)
        self._times = Timetable(graph, cost) if self.states else None
        self.junctions = [junctions(each) for each in self.crossings]
        self._choices: dict[object, Retention] = {}
        self.channels = sorted(
            {name for each in self.crossings for value in each.values for name in value.us or ()}
        )

    def choices(self) -> Iterator[tuple[Choose, Retention]]:
        """Yield choices to schedule, each with what finds it, to be called again for another limit:
        the largest that fits of each setting, and what upstream's partition keeps.
        """
        for stride in STRIDES:
            for settings in ON_DEVICE:
                choose = functools.partial(self.choice, replace(settings, stride=stride))
                found = choose()
                yield choose, found
                if (
                    found.byte_us == 0.0
                    and found.peak_bytes <= ON_DEVICE[-1].share * self.limit_bytes
                ):
                    return  # everything is kept, and as much is left as any leave
            if found.peak_bytes <= ON_DEVICE[-1].share * self.limit_bytes:
                break
        partition = [kept_by_partition(each) for each in self.borders]
        others: list[Choose] = [functools.partial(self.keeping, partition)]
        if self.states:
            others.append(functools.partial(self._partition_with_states_away, partition))
        yield from ((each, each()) for each in others)
        for settings in OVER_HOST:
            if (settings.host and not self.movable) or (settings.states and not self.states):
                continue
            for stride in STRIDES:
                choose = functools.partial(self.choice, replace(settings, stride=stride))
                found = choose()
                yield choose, found
                if found.peak_bytes <= settings.share * self.limit_bytes:
                    break

    def _partition_with_states_away(self, partition: Sequence[Collection[fx.Node]]) -> Retention:
        """Return what upstream's partition keeps, with states away, and with gathered parameters
        while they fit beside it.
        """
        limit = int(PARTITION_SHARE * self.limit_bytes)
        states = self._states_within(self._host_bytes(PARTITION_SHARE))
        gathered = [
            {node for node in each.nodes if is_wait(node) and GATHERED_FOR in _custom(node)}
            for each in self.crossings
        ]
        both = [{*kept, *more} for kept, more in zip(partition, gathered, strict=True)]
        lean, rich = (self.keeping(kept, states) for kept in (partition, both))
        return self._without_needless_moves(self._filled(lean, rich, limit, 0.0), limit)

    def keeping(self, kept: Sequence[Collection[fx.Node]], states: int = 0) -> Retention:
        """Return the choice that keeps these nodes of each border's forward, as far as it may, and
        the first states on the host.
        """
        cuts = [
            completed(each.values, {i for i, node in enumerate(each.nodes) if node in nodes})
            for each, nodes in zip(self.crossings, kept, strict=True)
        ]
        return self.priced(tuple(cuts), 0.0, states=states)

    def choice(self, settings: SearchSettings) -> Retention:
        """Return the largest choice of some settings that fits at any price, or the leanest if none
        fits.
        """
        weights, limit = self._weights(settings.link), int(settings.share * self.limit_bytes)
        host_bytes = self._host_bytes(settings.host)
        states = self._states_within(self._host_bytes(settings.states))
        rich = self._choice(settings.stride, weights, 0.0, host_bytes, states)
        # At this price a microsecond buys no byte.
        dear = 1.0 + sum(
            sum((value.us or {}).values()) for each in self.crossings for value in each.values
        )
        lean = self._choice(settings.stride, weights, dear, host_bytes, states)
        if lean.peak_bytes > limit:
            return lean
        low, high = 1e-12, dear
        for _ in range(PRICES if rich.peak_bytes > limit else 0):
            middle = (low * high) ** 0.5
            tried = self._choice(settings.stride, weights, middle, host_bytes, states)
            if tried.peak_bytes <= limit:
                lean, high = tried, middle
            else:
                rich, low = tried, middle
            if lean.cuts == rich.cuts:
                break
        if rich.peak_bytes <= limit:
            found = rich
        else:
            found = self._filled(lean, rich, limit, host_bytes)
        return self._without_needless_moves(found, limit)

    def _host_bytes(self, share: float) -> float:
        """Return what goes to the host and back in a share of the time of compute."""
        return share * self.compute_us * self.host_bytes_per_us / 2

    def _states_within(self, host_bytes: float) -> int:
        """Return how many states take no more than so many bytes."""
        sizes = itertools.accumulate(each.bytes for each in self.states)
        return sum(size <= host_bytes for size in sizes)

    def _weights(self, link: float) -> dict[str, float]:
        return {name: 1.0 if name == COMPUTE else link for name in self.channels}

    def _choice(
        self,
        stride: int,
        weights: Mapping[str, float],
        byte_us: float,
        host_bytes: float = 0.0,
        states: int = 0,
    ) -> Retention:
        # Settings that differ by their limit alone begin with the same prices.
        key = stride, tuple(weights.items()), byte_us, host_bytes, states
        if key in self._choices:
            return self._choices[key]
        cuts = []
        for crossing, found in zip(self.crossings, self.junctions, strict=True):
            values = list(crossing.values)
            for at in (i for alive in found[::stride] for i in alive):
                values[at] = replace(values[at], us=None)
            cut = cheapest(values, weights, byte_us + self.read_us)
            cuts.append(completed(crossing.values, cut.kept))
        moved = self._moved(cuts, host_bytes)
        self._choices[key] = self.priced(tuple(cuts), byte_us, moved, states)
        return self._choices[key]

    def _moved(self, cuts: Sequence[MinimumCut], host_bytes: float) -> tuple[tuple[int, int], ...]:
        """Return what of the kept values goes to the host: the earliest, as many as may."""
        moved = []
        for number, i in self.movable:
            size = self.crossings[number].values[i].bytes or 0
            if i in cuts[number].kept and size <= host_bytes:
                moved.append((number, i))
                host_bytes -= size
        return tuple(moved)

    def _without_needless_moves(self, choice: Retention, limit: int) -> Retention:
        """Leave the latest values where they are, and the last states, as far as the choice still
        fits.
        """

        def with_moves(count: int) -> Retention:
            moved, states = choice.moved[:count], max(0, count - len(choice.moved))
            return self.priced(choice.cuts, choice.byte_us, moved, states)

        best, low, high = choice, 0, len(choice.moved) + choice.states
        while low < high:
            middle = (low + high) // 2
            tried = with_moves(middle)
            if tried.peak_bytes <= limit:
                best, high = tried, middle
            else:
                low = middle + 1
        return best

    def _filled(self, lean: Retention, rich: Retention, limit: int, host_bytes: float) -> Retention:
        """Add to a choice what still fits of what another one keeps, the latest values first."""
        more = [
            (number, i)
            for number, (less, most) in enumerate(zip(lean.cuts, rich.cuts, strict=True))
            for i in sorted(most.kept - less.kept, reverse=True)
        ]

        def with_values(added: Sequence[tuple[int, int]]) -> Retention:
            kept = [set(cut.kept) for cut in lean.cuts]
            for number, i in added:
                kept[number].add(i)
            pairs = zip(self.crossings, kept, strict=True)
            cuts = tuple(completed(crossing.values, each) for crossing, each in pairs)
            return self.priced(cuts, lean.byte_us, self._moved(cuts, host_bytes), lean.states)

        best, added = lean, list[tuple[int, int]]()
        for _ in range(1 + SKIPPED):
            low, high = 0, len(more)
            while low < high:
                middle = (low + high + 1) // 2
                tried = with_values([*added, *more[:middle]])
                if tried.peak_bytes <= limit:
                    best, low = tried, middle
                else:
                    high = middle - 1
            added += more[:low]
            more = more[low + 1 :]
        return best

    def priced(
        self,
        cuts: tuple[MinimumCut, ...],
        byte_us: float,
        moved: tuple[tuple[int, int], ...] = (),
        states: int = 0,
    ) -> Retention:
        """Return a choice of what each border keeps, with its peak."""
        again = {
            self.liveness.place[crossing.nodes[i]]
            for crossing, cut in zip(self.crossings, cuts, strict=True)
            for i in cut.again
        }
        away = {self.liveness.place[self.crossings[number].nodes[i]] for number, i in moved}
        peak = max(self.liveness.bytes_over_time(again, away, self._beside(states)))
        return Retention(cuts, peak, byte_us, moved, states)

    def _beside(self, states: int) -> list[tuple[int, int, int]]:
        """Return what the first states take less while they are away, and their copies more."""
        found = []
        away = self._times.of(self.states[:states]) if self._times else []
        for state, times in zip(self.states, away, strict=False):
            if times.gone < times.first:
                found.append((-state.bytes, times.gone, times.first - 1))
            found.append((state.bytes, times.starts, times.last))
        return found

    def least_us(self, compute_us: float) -> float:
        """Return the least time of any choice that fits, of a step that computes for so long
        without what runs again.

        The more is moved to the host, the less runs again, and the longer copies take.
        """
        if not self.host_bytes_per_us:
            return compute_us + self._least_again_us(self.limit_bytes)
        low, high = 0.0, float(sum(value.bytes or 0 for c in self.crossings for value in c.values))
        high += sum(each.bytes for each in self.states)
        for _ in range(PRICES):
            middle = (low + high) / 2
            again_us = self._least_again_us(self.limit_bytes + middle)
            if compute_us + again_us > 2 * middle / self.host_bytes_per_us:
                low = middle
            else:
                high = middle
        return compute_us + self._least_again_us(self.limit_bytes + high)

    def _least_again_us(self, limit_bytes: float) -> float:
        """Return the least time of compute that runs again where so much may be kept.

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
                found.append(worth - price * limit_bytes)
                price *= 2
            total += max(found)
        return total

    def again_us(self, choice: Retention) -> float:
        """Return the time of compute that runs again."""
        return sum(
            (crossing.values[i].us or {}).get(COMPUTE, 0.0)
            for crossing, cut in zip(self.crossings, choice.cuts, strict=True)
            for i in cut.again
        )

    def gathers_again(self, choice: Retention) -> list[int]:
        """Return the numbers of the launches that run again."""
        _, again = self.marks(choice)
        return sorted(self.number[node] for node in again if node in self.number)

    def moves(self, choice: Retention) -> list[fx.Node]:
        """Return the nodes that a choice keeps on the host."""
        return [self.crossings[number].nodes[i] for number, i in choice.moved]

    def marks(self, choice: Retention) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the nodes that a choice keeps, and those that run again."""
        pairs = list(zip(self.crossings, choice.cuts, strict=True))
        kept = [crossing.nodes[i] for crossing, cut in pairs for i in sorted(cut.kept)]
        again = [crossing.nodes[i] for crossing, cut in pairs for i in sorted(cut.again)]
        return kept, again
