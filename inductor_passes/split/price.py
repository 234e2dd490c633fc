"""Price a graph that is split or not: its schedule's step, forward and backward one after the
other.

Layers are found in the order of the graph: a stretch in which each node looks like the one a
*period* further on. A joint graph has two of them, of the forward and of the backward, which meet
layer by layer from opposite ends.

AOTAutograd makes two graphs of a joint one, and the tangents enter between them. Here what the
forward's results need is the forward, and all else the backward, as what is saved is chosen later.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from inductor_passes.cost.model import launching_us
from inductor_passes.graph.collectives import is_launch
from inductor_passes.schedule.extract import Extracted
from inductor_passes.schedule.schedule_pass import CAP_BYTES, ScheduleGraph
from inductor_passes.schedule.solver.lower_bound import limit_us
from inductor_passes.schedule.solver.repeated_layers import WINDOW, left_out, stretches
from inductor_passes.torch_compat import aot

FORWARD, BACKWARD = "forward", "backward"


def backward_of(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the operators of a joint graph's backward; of another graph none."""
    # Whatever depends on a tangent can only run in the backward.
    late = set(aot.tangents(graph))
    if not late:
        return frozenset()
    for node in graph.nodes:
        if any(source in late for source in node.all_input_nodes):
            late.add(node)
    # What results of the forward need. All else, as a recomputation, counts for the backward.
    early = {node for node in graph.output_node().all_input_nodes if node not in late}
    for node in reversed(graph.nodes):
        if node in early:
            early.update(node.all_input_nodes)
    for node in graph.nodes:
        # A result of a node that runs in the forward is there at no cost.
        if node.target is operator.getitem and node.args[0] in early:
            early.add(node)
    calls = (node for node in graph.nodes if node.op not in ("placeholder", "output"))
    return frozenset(node for node in calls if node not in early)


def halves(graph: fx.Graph) -> tuple[fx.Graph, ...]:
    """Return copies of a joint graph's forward and backward, each for being priced; of another
    graph itself.

    What the backward reads of the forward is a result there and an input here. Names stay.
    """
    late = backward_of(graph)
    if not late:
        return (graph,)
    calls = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    results = graph.output_node().all_input_nodes
    inner = [node for node in calls if node not in late]
    read = dict.fromkeys(used for node in calls if node in late for used in node.all_input_nodes)
    saved = [node for node in read if node not in late and node.op != "placeholder"]
    first = _part(graph, inner, (), [n for n in results if n not in late] + saved)
    behind = [node for node in calls if node in late]
    return first, _part(graph, behind, saved, [node for node in results if node in late])


def _part(
    graph: fx.Graph,
    nodes: Iterable[fx.Node],
    given: Iterable[fx.Node],
    results: Iterable[fx.Node],
) -> fx.Graph:
    nodes, results = list(nodes), list(dict.fromkeys(results))
    read = {used for node in nodes for used in node.all_input_nodes} | set(results)
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node in read:
            copies[node] = made.node_copy(node)
    for node in given:
        copies[node] = made.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in nodes:
        copies[node] = made.node_copy(node, lambda used: copies[used])
    made.output(tuple(copies[node] for node in results))
    return made


FIRST, LAST = 1, 2  # layers that are kept at either end of a stretch


@dataclass(frozen=True, slots=True)
class Folded:
    """A graph in which ``kept`` of ``layers`` equal layers are left, and the node of the whole
    graph that each node is.
    """

    graph: fx.Graph
    whole: Mapping[fx.Node, fx.Node] = field(default_factory=dict)
    layers: int = 1
    kept: int = 1


def fold(graph: fx.Graph) -> Folded:
    """Return a copy without the middle layers; the graph itself where it has few.

    What is kept and reads a layer that is gone reads its like in another, so that shapes agree and
    every node costs what it did. The copy computes something else: it is for being priced.
    """
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    found = left_out(list(stretches(looks(nodes))), FIRST, LAST)
    if not found:
        return Folded(graph)
    place = {node: i for i, node in enumerate(nodes)}
    of = {at: stretch for stretch in found for at in stretch.left_out}

    def reads(node: fx.Node, source: fx.Node) -> fx.Node:
        at = place.get(source, -1)
        return nodes[of[at].stand_in(at, place[node])] if at in of else source

    kept = [node for at, node in enumerate(nodes) if at not in of]
    inputs = {node: {used: reads(node, used) for used in node.all_input_nodes} for node in kept}
    read = {source for sources in inputs.values() for source in sources.values()}
    made = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.find_nodes(op="placeholder"):
        if node in read:
            copies[node] = made.node_copy(node)
    for node in kept:
        source_of = inputs[node]
        # The lambda is called before the next node binds ``source_of`` anew.
        copies[node] = made.node_copy(node, lambda used: copies[source_of[used]])  # noqa: B023
    output = graph.output_node()
    made.output(tuple(copies[node] for node in output.all_input_nodes if node in copies))
    # Forward and backward of one model are two stretches; the one with more layers scales the few
    # to the whole.
    most = max(found, key=lambda stretch: stretch.layers)
    whole = {copy: node for node, copy in copies.items()}
    return Folded(made, whole, most.layers, most.layers - most.gone)


def looks(nodes: Sequence[fx.Node]) -> list[int]:
    """Return a number for each node: equal where nodes do the same on the same shapes, with the
    same close by.
    """
    numbers: dict[str, int] = {}
    place = {node: i for i, node in enumerate(nodes)}
    found = []
    for i, node in enumerate(nodes):
        near = [i - place.get(used, -1) for used in node.all_input_nodes]
        args = fx.node.map_arg((node.args, node.kwargs), lambda used: None)
        target = node.target if node.op == "call_function" else node.op
        said = f"{target} {args} {_said(node.meta.get('val'))} {[d for d in near if d <= WINDOW]}"
        found.append(numbers.setdefault(said, len(numbers)))
    return found


def _said(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(_said, value))
    return (
        f"{value.dtype} {list(value.shape)} {value.stride()}"
        if isinstance(value, torch.Tensor)
        else ""
    )


@dataclass(frozen=True, slots=True)
class Price:
    """Predicted of a graph, scheduled; of a joint graph its forward and backward apart, in this
    order.

    Where launches take processor time of what computes (``launching_us``), ``us`` counts it for
    each, as though nothing hid it.
    ``exposed``: how long compute waits for launches, by their names.
    """

    us: tuple[float, ...]
    limit_us: float
    peak_bytes: tuple[int, ...]
    cap_bytes: tuple[int, ...]
    exposed: Mapping[str, float] = field(default_factory=dict)

    @property
    def step_us(self) -> float:
        """The makespan of all of it."""
        return sum(self.us)

    def fits(self, uncut: Price) -> bool:
        """Return whether it takes no more memory than it may, or than the uncut graph does."""
        each = zip(self.peak_bytes, self.cap_bytes, uncut.peak_bytes, strict=True)
        return all(peak <= max(cap, was) for peak, cap, was in each)


class Prices:
    """Prices of one graph, cut in one way or another, within the memory that the uncut one may
    take.
    """

    def __init__(self, graph: fx.Graph, folded: Folded, scheduler: ScheduleGraph) -> None:
        self.scheduler = scheduler
        self._caps: tuple[int, ...] | None = None
        self.cap_bytes = 0  # of the graph, all its layers, in one piece
        if folded.graph is not graph:
            # The budget above the program's order is that of the whole graph, applied to the few
            # layers: what a chunk adds is held once and not in each layer.
            few = [scheduler.peak_and_cap_bytes(part)[0] for part in halves(folded.graph)]
            rooms = [scheduler.peak_and_cap_bytes(part) for part in halves(graph)]
            self._caps = tuple(
                peak + cap - own for peak, (own, cap) in zip(few, rooms, strict=True)
            )
            self.cap_bytes = max(cap for _, cap in rooms)
        self.uncut = self.of(folded.graph)
        if self._caps is None:
            self._caps = self.uncut.cap_bytes
            self.cap_bytes = max(self._caps)

    def of(self, graph: fx.Graph, sure: bool = True) -> Price:
        """Return the price of the graph, or of a copy of it that was cut; unless ``sure``,
        buckets are not tried in the graph.
        """
        us, limit, peaks, caps, exposed = [], 0.0, [], [], {}
        for i, part in enumerate(halves(graph)):
            if self._caps is not None:
                # A cut graph has a peak of its own. Measured from that, a cut that wastes memory
                # would be granted more.
                part.output_node().meta[CAP_BYTES] = self._caps[i]
            extracted = self.scheduler.extract(part)
            how = self.scheduler.plan if sure else self.scheduler.forecast
            solution, refused = how(part, extracted)
            makespan_us = solution.original_makespan_us if refused else solution.makespan_us
            merged = () if refused else solution.buckets
            us.append(makespan_us + self._launching_us(extracted, merged))
            limit += limit_us(extracted.problem)
            peaks.append(solution.peak_bytes)
            caps.append(solution.cap_bytes)
            for item in solution.reasons:
                node = extracted.nodes[item.launch]
                if node is not None and is_launch(node):
                    exposed[node.name] = item.us
        return Price(tuple(us), limit, tuple(peaks), tuple(caps), exposed)

    def _launching_us(self, extracted: Extracted, buckets: Sequence[Sequence[int]]) -> float:
        each = launching_us(self.scheduler.cost)
        launches = sum(node.kind == "launch" for node in extracted.problem.nodes)
        # A bucket is one launch.
        return each * (launches - sum(len(bucket) - 1 for bucket in buckets))
