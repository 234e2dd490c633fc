"""Private names of torch that settling needs: what AOTAutograd makes of equal launches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from inductor_passes.collectives import is_launch, is_wait


@contextlib.contextmanager
def equal_launches_stay() -> Iterator[None]:
    """Equal launches of a forward graph, and those of a backward graph, stay launches of their own in the block.

    Where each rank makes one of them, a rank whose graph a break cuts between the two, or that runs in Python,
    launches more than its peers. What a backward graph would launch as its forward one has is still left out: both are
    cut in the same place. ``partitioners.fx_graph_cse``, ``compile_utils.rand_ops`` and the tag ``is_forward`` were seen
    in 2.11 to 2.15; where they are missing, stock's way stays.
    """
    from torch._functorch import compile_utils, partitioners

    owner: Any = partitioners
    stock = getattr(owner, "fx_graph_cse", None)
    if stock is None or not hasattr(compile_utils, "rand_ops"):
        yield
        return

    def without_launches(graph: fx.Graph, **how: Any) -> fx.Graph:
        launches = {node.target.overloadpacket for node in graph.nodes if is_launch(node)}
        before = compile_utils.rand_ops
        compile_utils.rand_ops = [*before, *launches]
        try:
            merged: fx.Graph = stock(graph, **how)
        finally:
            compile_utils.rand_ops = before
        return merged

    owner.fx_graph_cse = functools.wraps(stock)(_apart(without_launches))
    try:
        yield
    finally:
        owner.fx_graph_cse = stock


def _apart(merge: Callable[..., fx.Graph]) -> Callable[..., fx.Graph]:
    def merge_all_but_launches(graph: fx.Graph, **how: Any) -> fx.Graph:
        merged = merge(graph, **how)
        return merge(merged, **how) if _launch_once_for_backward(merged) else merged

    return merge_all_but_launches


def _launch_once_for_backward(joint: fx.Graph) -> bool:
    """Let the backward part read what the forward part has launched already; whether there was any."""
    forward: dict[tuple[str, ...], fx.Node] = {}
    returned = {_storage(node) for node in joint.output_node().all_input_nodes} - {None}
    changed = False
    for node in joint.nodes:
        if not is_launch(node) or _storage(node) in returned:
            continue
        # Between writes to an input the same launch need not bring the same.
        same = node.target, node.args, node.kwargs, node.meta.get("mutation_region_id")
        signature = tuple(map(str, same))
        if node.meta.get("partitioner_tag") == "is_forward":
            forward.setdefault(signature, node)
        elif (first := forward.get(signature)) is not None:
            for wait, own in zip(_waits(first), _waits(node), strict=False):
                own.replace_all_uses_with(wait)
                joint.erase_node(own)
            node.replace_all_uses_with(first)
            joint.erase_node(node)
            changed = True
    return changed


def _waits(launch: fx.Node) -> list[fx.Node]:
    return [user for user in launch.users if is_wait(user)]


def _storage(node: fx.Node) -> int | None:
    """The memory of a tensor; None for what has none of its own."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:
        return None
