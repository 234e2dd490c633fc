"""Move values to the host's memory, and back before a backward or an update reads them.

A copy is a launch and a wait, as a collective is, over a channel of its own: the scheduler decides
when it starts and when it is awaited. On a GPU it runs on a stream beside what computes, through
memory that is pinned. Tensors that are the host's already are copied at once, so that what a graph
computes can be tested without a GPU.

What an optimizer keeps between steps is an input of the graph. Its tensor stays the program's: its
storage is empty from where the copy is done to the update, which writes it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.cost.model import host_bytes_per_us
from inductor_passes.graph.aliasing import written_to_input
from inductor_passes.graph.collectives import HOST, HOST_NAMESPACE, tensor_bytes
from inductor_passes.graph.edit import emit
from inductor_passes.graph.phases import inherit_phase, stage_of
from inductor_passes.rewrite.rematerialize import Border

_library = torch.library.Library(HOST_NAMESPACE, "DEF")
_library.define("offload(Tensor value, str group_name) -> Tensor")
_library.define("reload(Tensor copy, Device device, str group_name) -> Tensor")
# The source is alive until its copy is done: who awaits the copy reads it.
_library.define("wait_tensor(Tensor(a) copy, Tensor source) -> Tensor(a)")
# ``copy`` and ``back`` are arguments so that neither runs before what it has to come behind. A CUDA
# graph would not see memory come and go.
_tags = (torch.Tag.cudagraph_unsafe,)
_library.define("release(Tensor(a!) state, Tensor copy) -> Tensor", tags=_tags)
_library.define("restore(Tensor(a!) state, Tensor released, Tensor back) -> ()", tags=_tags)

SMALLEST_MOVED = 2**20  # bytes: a smaller copy takes its start and little else

_streams: dict[torch.device, torch.Stream] = {}
_events: dict[int, torch.Event] = {}  # of copies on their way, by the address of their result


def _copied(source: torch.Tensor, result: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start a copy on the device's stream for copies, behind what computes now."""
    if device not in _streams:
        _streams[device] = torch.Stream(device=device)
    stream = _streams[device]
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        result.copy_(source, non_blocking=True)
    _events[result.data_ptr()] = stream.record_event()
    return result


def _offload(value: torch.Tensor, group_name: str) -> torch.Tensor:
    if value.device.type == "cpu":
        return value.clone()
    return _copied(value, torch.empty_like(value, device="cpu", pin_memory=True), value.device)


def _reload(copy: torch.Tensor, device: torch.device, group_name: str) -> torch.Tensor:
    if device.type == "cpu":
        return copy.clone()
    # Memory of the stream that computes: it is freed where that stream has read it.
    return _copied(copy, torch.empty_like(copy, device=device), device)


def _wait(copy: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if (event := _events.pop(copy.data_ptr(), None)) is not None:
        device = source.device if copy.device.type == "cpu" else copy.device
        torch.accelerator.current_stream(device).wait_event(event)
    return copy


def _release(state: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    storage = state.untyped_storage()
    # A tensor that shows a part of a storage leaves the others what they hold.
    if storage.nbytes() == state.nbytes:
        storage.resize_(0)
    return copy.new_empty(0)


def _restore(state: torch.Tensor, released: torch.Tensor, back: torch.Tensor) -> None:
    storage = state.untyped_storage()
    if not storage.nbytes():
        storage.resize_(state.nbytes)


for _name, _call, _shown in (
    ("offload", _offload, lambda value, group_name: torch.empty_like(value, device="cpu")),
    ("reload", _reload, lambda copy, device, group_name: torch.empty_like(copy, device=device)),
    ("wait_tensor", _wait, lambda copy, source: copy),
    ("release", _release, lambda state, copy: copy.new_empty(0)),
    ("restore", _restore, lambda state, released, back: None),
):
    _library.impl(_name, _call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{HOST_NAMESPACE}::{_name}", _shown, lib=_library)


def move_to_host(border: Border, values: Collection[fx.Node]) -> None:
    """Have a backward read values of the forward before it from copies that wait on the host.

    All that the backward computes again from them stands in it already.
    """
    graph, ops = border.graph, getattr(torch.ops, HOST_NAMESPACE)
    place = {node: i for i, node in enumerate(graph.nodes)}
    for value in values:
        ahead = [user for user in value.users if user in border.forward]
        behind = [user for user in value.users if user in border.backward]
        if not behind:
            continue
        last = max((value, *ahead), key=place.__getitem__)
        with graph.inserting_after(value):
            out = emit(graph, ops.offload.default, (value, HOST), value)
        with graph.inserting_after(out if last is value else last):
            held = emit(graph, ops.wait_tensor.default, (out, value), value)
        with graph.inserting_before(min(behind, key=place.__getitem__)):
            device = value.meta["val"].device
            back = emit(graph, ops.reload.default, (held, device, HOST), value)
            read = emit(graph, ops.wait_tensor.default, (back, held), value)
        border.forward |= {out: None, held: None}
        inherit_phase(out, value)
        inherit_phase(held, value)
        for node in (back, read):
            border.add_to_backward(node)
        for user in behind:
            user.replace_input_with(value, read)


@dataclass(frozen=True, slots=True)
class State:
    """An input that only the update of a training step reads, and writes."""

    node: fx.Node
    readers: tuple[fx.Node, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return tensor_bytes(self.node.meta["val"])


# Of the ``meta`` of an input: it waits on the host up to its update.
AWAY = "inductor_passes_away"


def marked_away(graph: fx.Graph) -> list[State]:
    """Return the states that are marked to wait on the host, as far as they still are such."""
    return [state for state in states_of(graph) if AWAY in state.node.meta]


def states_of(graph: fx.Graph) -> list[State]:
    """Return the states that a whole training step updates behind its backwards."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {copy.args[0] for copy in copies if written_to_input(copy)}
    states: list[State] = []
    for node in graph.find_nodes(op="placeholder"):
        readers = tuple(user for user in node.users if written_to_input(user) is None)
        if (
            node in written
            and {stage_of(reader) for reader in readers} == {"update"}
            and tensor_bytes(node.meta["val"]) >= SMALLEST_MOVED
        ):
            states.append(State(node, readers))
    return states


@dataclass(frozen=True, slots=True)
class Away:
    """Places in a graph: before ``gone`` a state's copy to the host is awaited, before ``starts``
    the one back begins, and from ``first`` to ``last`` the update reads it.
    """

    gone: int
    starts: int
    first: int
    last: int


class Timetable:
    """When copies to the host can be done, and have to start back, to hold nothing up in the order
    of a graph.
    """

    def __init__(self, graph: fx.Graph, cost: CostModel) -> None:
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self._starts_us = [0.0, *itertools.accumulate(map(cost.compute_us, graph.nodes))]
        self._bytes_per_us = host_bytes_per_us(cost)
        # Other nodes may stand before the last input.
        inputs = graph.find_nodes(op="placeholder")
        self.begin = 1 + max((self.place[node] for node in inputs), default=-1)

    def of(self, states: Sequence[State]) -> list[Away]:
        """Return the places of each, all copies being on one link, in this order."""
        reads = [[self.place[reader] for reader in state.readers] for state in states]
        gone, clock = list[int](), 0.0
        for state in states:
            clock += state.bytes / self._bytes_per_us
            gone.append(max(self.begin, bisect.bisect_left(self._starts_us, clock)))
        starts, latest = [0] * len(states), self._starts_us[-1]
        for i in sorted(range(len(states)), key=lambda i: min(reads[i]), reverse=True):
            by_then = min(latest, self._starts_us[min(reads[i])])
            latest = by_then - states[i].bytes / self._bytes_per_us
            starts[i] = bisect.bisect_right(self._starts_us, latest) - 1
        return [
            Away(min(out, min(at)), min(max(out, back), min(at)), min(at), max(at))
            for out, back, at in zip(gone, starts, reads, strict=True)
        ]


def move_states(graph: fx.Graph, states: Sequence[State], cost: CostModel) -> None:
    """Give the memory of states back up to their update, which reads copies from the host."""
    ops = getattr(torch.ops, HOST_NAMESPACE)
    nodes = list(graph.nodes)
    timetable = Timetable(graph, cost)
    times = timetable.of(states)
    copies: list[fx.Node] = []

    def add(at: fx.Node, operator: object, *args: object) -> fx.Node:
        with graph.inserting_before(at):
            node = emit(graph, operator, args, state.node)
        inherit_phase(node, at)
        return node

    for state in states:
        copies.append(add(nodes[timetable.begin], ops.offload.default, state.node, HOST))
    for state, out, away in zip(states, copies, times, strict=True):
        gone, starts, first = (nodes[at] for at in (away.gone, away.starts, away.first))
        held = add(gone, ops.wait_tensor.default, out, state.node)
        released = add(gone, ops.release.default, state.node, held)
        device = state.node.meta["val"].device
        back = add(starts, ops.reload.default, held, device, HOST)
        read = add(first, ops.wait_tensor.default, back, held)
        add(first, ops.restore.default, state.node, released, read)
        for reader in state.readers:
            reader.replace_input_with(state.node, read)
        state.node.meta.pop(AWAY, None)
