"""Equal launches of one graph, which AOTAutograd would make one on its own: left to a pass, so that ranks agree."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from inductor_passes.graph.collectives import is_launch, is_wait, signature
from inductor_passes.torch_compat.aot import merged_without


@contextlib.contextmanager
def equal_launches_stay() -> Iterator[None]:
    """Equal launches of a forward graph, and those of a backward graph, stay launches of their own in the block.

    Where each rank makes one of them, a rank whose graph a break cuts between the two, or that runs in Python,
    launches more than its peers. What a backward graph would launch as its forward one has is still left out: both are
    cut in the same place. The tag ``is_forward`` was seen in 2.11 to 2.15.
    """
    with merged_without(_launches, again=_launch_once_for_backward):
        yield


def _launches(graph: fx.Graph) -> set[object]:
    return {node.target.overloadpacket for node in graph.nodes if is_launch(node)}


def _launch_once_for_backward(joint: fx.Graph) -> bool:
    """Let the backward part read what the forward part has launched already; whether there was any."""
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
