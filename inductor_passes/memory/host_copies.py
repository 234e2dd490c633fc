"""Move values to the host's memory, and back before a backward reads them.

A copy is a launch and a wait, as a collective is, over a channel of its own: the scheduler decides
when it starts and when it is awaited. On a GPU it runs on a stream beside what computes, through
memory that is pinned. Tensors that are the host's already are copied at once, so that what a graph
computes can be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from inductor_passes.graph.collectives import HOST, HOST_NAMESPACE
from inductor_passes.graph.edit import emit
from inductor_passes.graph.phases import inherit_phase
from inductor_passes.rewrite.rematerialize import Border

_library = torch.library.Library(HOST_NAMESPACE, "DEF")
_library.define("offload(Tensor value, str group_name) -> Tensor")
_library.define("reload(Tensor copy, Device device, str group_name) -> Tensor")
# The source is alive until its copy is done: who awaits the copy reads it.
_library.define("wait_tensor(Tensor(a) copy, Tensor source) -> Tensor(a)")

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


for _name, _call, _shown in (
    ("offload", _offload, lambda value, group_name: torch.empty_like(value, device="cpu")),
    ("reload", _reload, lambda copy, device, group_name: torch.empty_like(copy, device=device)),
    ("wait_tensor", _wait, lambda copy, source: copy),
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
