"""Private torch names of random operators: the partitioner's pass over those that are recomputed."""

from __future__ import annotations

import functools
from typing import Any

import torch._functorch.partitioners as _partitioners
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject

from dynamo_dist._torch import Change as Change
from dynamo_dist._torch import SetAttribute


def save_states_before_objects() -> list[Change]:
    """Random states that a backward graph replays stand before the objects that it needs.

    What a forward graph saves is read back by position: tensors, objects such as a DeviceMesh, sizes.
    Stock adds the states behind the objects, where the runtime takes a mesh for a tensor. Seen in 2.12
    to 2.15; in 2.11 a mesh is no value of a graph.
    """
    stock = _partitioners.functionalize_rng_ops

    @functools.wraps(stock)
    def functionalize(joint: Any, forward: Any, backward: Any, last: int) -> Any:
        inputs = backward.graph.find_nodes(op="placeholder")
        tangent = next((node for node in inputs if "tangent" in node.name), None)
        saved = inputs[: inputs.index(tangent)] if tangent is not None else []
        objects = [node for node in saved if _is_object(node)]
        forward, backward = stock(joint, forward, backward, last + len(objects))
        for node in objects:
            tangent.prepend(node)  # type: ignore[union-attr]
        backward.recompile()
        return forward, backward

    return [SetAttribute(_partitioners, "functionalize_rng_ops", functionalize)]


def _is_object(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), FakeScriptObject)
