"""Share collectives: a value gathered once need not be gathered again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from inductor_passes.graph.collectives import (
    is_launch,
    is_wait,
    kind,
    launches,
    output_bytes,
    payload_bytes,
    signature,
    waits_of,
)
from inductor_passes.graph.edit import replace
from inductor_passes.graph.phases import computes_again, phase_of
from inductor_passes.graph_pass import PassStats, Rewrite
from inductor_passes.torch_compat.aot import merged_without

SHARED_KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")


class ShareLaunches(Rewrite):
    """Start one collective in place of several that do the same with the same source.

    A result above ``budget_bytes`` is not kept for a later reader: it may have been given up on
    purpose, as when parameters are resharded between uses. Nor is one over a backward.

    Requires: a functional graph.
    Ensures:  every bit as before; a second run changes nothing.
    Stats:    ``launches_removed``, ``bytes_saved`` (payload of this rank).
    """

    name = "share_launches"
    shows_in_plan = True

    def __init__(self, budget_bytes: int = 1 << 30) -> None:
        self.budget_bytes = budget_bytes

    def digest(self) -> str:
        return f"{self.budget_bytes}"

    def run(self, graph: fx.Graph) -> PassStats:
        count = saved = 0
        first_of: dict[object, fx.Node] = {}
        position: dict[fx.Node, int] = {}
        for launch in launches(graph):
            if kind(launch) not in SHARED_KINDS or len(waits_of(launch)) != 1:
                continue
            # In a whole step another forward, or a backward, gathers anew what was resharded.
            if computes_again(launch):
                continue
            first = first_of.setdefault((phase_of([launch]), signature(launch)), launch)
            if first is launch or output_bytes(first) > self.budget_bytes:
                continue
            position = position or {node: i for i, node in enumerate(graph.nodes)}
            wait, own = waits_of(first)[0], waits_of(launch)[0]
            # The first launch's wait may stand below the second's: it moves up, since its value is
            # needed there.
            if position[wait] > position[own]:
                own.prepend(wait)
                position[wait] = position[own]
            replace(own, wait, self.name)
            saved += payload_bytes(launch)
            count += 1
            graph.erase_node(own)
            graph.erase_node(launch)
        return PassStats(count > 0, {"launches_removed": count, "bytes_saved": saved})


@contextlib.contextmanager
def equal_launches_stay() -> Iterator[None]:
    """Equal launches of a forward graph, and those of a backward graph, stay launches of their own
    in the block.

    Where each rank makes one of them, a rank whose graph a break cuts between the two, or that runs
    in Python, launches more than its peers. What a backward graph would launch as its forward one
    has is still left out: both are cut in the same place. The tag ``is_forward`` was seen in 2.11
    to 2.15.
    """
    with merged_without(_launches, again=_launch_once_for_backward):
        yield


def _launches(graph: fx.Graph) -> set[object]:
    return {node.target.overloadpacket for node in graph.nodes if is_launch(node)}


def _launch_once_for_backward(joint: fx.Graph) -> bool:
    """Let the backward part read what the forward part has launched already; whether there was
    any.
    """
    forward: dict[object, fx.Node] = {}
    returned = {_storage(node) for node in joint.output_node().all_input_nodes} - {None}

    def is_returned(launch: fx.Node) -> bool:
        # A gradient is memory of its own, that callers may write to.
        return any(_storage(each) in returned for each in (launch, *_waits(launch)))

    changed = False
    for node in joint.nodes:
        if not is_launch(node):
            continue
        # Between writes to an input the same launch need not bring the same.
        same = signature(node), node.meta.get("mutation_region_id")
        if node.meta.get("partitioner_tag") == "is_forward":
            forward.setdefault(same, node)
        elif (first := forward.get(same)) is not None and not is_returned(node):
            for wait, own in zip(_waits(first), _waits(node), strict=False):
                own.replace_all_uses_with(wait)
                joint.erase_node(own)
            node.replace_all_uses_with(first)
            joint.erase_node(node)
            changed = True
    return changed


def _waits(launch: fx.Node) -> list[fx.Node]:
    return [user for user in launch.users if is_wait(user)]


def _storage(node: fx.Node) -> StorageWeakRef | None:
    """The memory of a tensor; None for what has none of its own."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return StorageWeakRef(value.untyped_storage())
    except NotImplementedError:
        return None
