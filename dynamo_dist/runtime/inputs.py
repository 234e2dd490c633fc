"""Inputs of a compiled graph: one for each object, and those that share memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from dynamo_dist.errors import DTensorError
from dynamo_dist.torch_compat import dynamo_building
from dynamo_dist.torch_compat.dtensor_specs import may_overlap


def merge_inputs(
    gm: fx.GraphModule, inputs: Sequence[Any], known: Mapping[Any, object]
) -> list[Any]:
    """Remove placeholders of ``gm`` that hold what an earlier one holds; the inputs that are left.

    ``known``: sources that are guarded by identity, with what they are.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs) or not dynamo_building.inputs_follow(gm):
        return list(inputs)
    first: dict[int, fx.Node] = {}
    left = []
    for node, given in zip(placeholders, inputs, strict=True):
        source = dynamo_building.source_of_input(node)
        held = known.get(source) if source is not None else None
        kept = node if held is None else first.setdefault(id(held), node)
        if kept is node:
            left.append(given)
        else:
            node.replace_all_uses_with(kept)
            gm.graph.erase_node(node)
    if len(left) < len(inputs):
        gm.recompile()
    return left


_CALLS = ("call_function", "call_method")


def check(gm: fx.GraphModule) -> None:
    """Raise DTensorError for a graph of Dynamo's that is given such inputs."""
    targets = [each for each in map(_target, gm.graph.nodes) if each is not None]
    if not targets:
        return
    # The stand-ins share memory as the inputs do.
    given = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    plain = [
        each for each in given if isinstance(each, torch.Tensor) and not isinstance(each, DTensor)
    ]
    local = [each._local_tensor for each in given if isinstance(each, DTensor)]
    shared = [b for b in local if any(may_overlap(a, b) for a in plain)]
    if any(may_overlap(_local(written), each) for written in targets for each in shared):
        raise DTensorError(
            "A compiled function is given a DTensor and a plain tensor of the same memory, and writes to it.",
            "What is written through one of them would not be seen through the other.",
            "Take the local tensor inside the compiled function, x.to_local(), or give it a copy, local.clone().",
        )


def _target(node: fx.Node) -> torch.Tensor | None:
    """The tensor that a node of Dynamo's writes to."""
    if node.op not in _CALLS or not _writes(node):
        return None
    first = node.args[0] if node.args else None
    value = first.meta.get("example_value") if isinstance(first, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _writes(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return (
        name == "setitem"
        or name.startswith(("iadd", "isub", "imul", "itruediv", "ipow"))
        or (name.endswith("_") and not name.endswith("__"))
    )
