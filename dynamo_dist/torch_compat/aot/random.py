"""Random operators in the joint graph: drawn once, never merged, states saved."""

from __future__ import annotations

import functools
from typing import Any

import torch._functorch.compile_utils as _compile_utils
import torch._functorch.partitioners as _partitioners
import torch._prims.rng_prims as _rng_prims
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject
from torch.utils.checkpoint import CheckpointPolicy

from dynamo_dist.torch_compat.changes import Change, SetAttribute, WrapAttribute


def save_states_before_objects() -> list[Change]:
    """Random states that a backward graph replays stand before the objects that it needs.

    What a forward graph saves is read back by position: tensors, objects such as a DeviceMesh, sizes.
    Stock adds the states behind the objects, where the runtime takes a mesh for a tensor. Seen in 2.13
    to 2.15.
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


def draw_once() -> list[Change]:
    """Draws of DTensors on CUDA are neither merged nor repeated, which would change what is drawn.

    They are calls of one higher-order operator, without the tag by which AOTAutograd knows random
    operators: it merges two draws of equal arguments into one, and in a checkpointed block draws anew
    for the backward. Its results are saved instead. Seen in 2.13 to 2.15.
    """
    operator = _rng_prims.run_dtensor_rng_op
    stock = _partitioners.force_save_effectful_ops

    @functools.wraps(stock)
    def force_save(joint: fx.GraphModule) -> None:
        stock(joint)
        for node in joint.graph.find_nodes(op="call_function", target=operator):
            items = node.users if isinstance(node.meta.get("val"), (tuple, list)) else ()
            for each in (node, *items):
                each.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    return [
        SetAttribute(_partitioners, "force_save_effectful_ops", force_save),
        WrapAttribute(_compile_utils, "rand_ops", lambda stock: [*stock, operator]),
    ]
