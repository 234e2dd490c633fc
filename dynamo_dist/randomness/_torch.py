"""Private torch names of random operators: what AOTAutograd's partitioner does with them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.compile_utils as _compile_utils
import torch._functorch.partitioners as _partitioners
import torch._prims.rng_prims as _rng_prims
from torch import fx
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed._functional_collectives import _are_we_tracing
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.utils.checkpoint import CheckpointPolicy

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


def rng_operator() -> Any:
    """The graph's operator that draws a shard's numbers at its offset; None before torch 2.12 or so."""
    return getattr(_rng_prims, "run_dtensor_rng_op", None)


def draw_once() -> list[Change]:
    """Draws of DTensors on CUDA are neither merged nor repeated, which would change what is drawn.

    They are calls of one higher-order operator, without the tag by which AOTAutograd knows random
    operators: it merges two draws of equal arguments into one, and in a checkpointed block draws anew
    for the backward. Its results are saved instead. Seen in 2.13 to 2.15.
    """
    operator = rng_operator()
    if operator is None:
        return []
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
        SetAttribute(_compile_utils, "rand_ops", [*_compile_utils.rand_ops, operator]),
    ]


def on_traced_draw(note: Callable[[Any], None]) -> list[Change]:
    """Call ``note(spec)`` for each random operator on a DTensor that is traced. Seen in 2.11 to 2.15."""
    stock = getattr(OpDispatcher, "_dispatch_get_local_results_slow_path", None)
    if stock is None:
        return []

    @functools.wraps(stock)
    def results(self: Any, op: Any, args: Any, *rest: Any) -> Any:
        if op in self._random_ops and _are_we_tracing():
            note(args[0]._spec)
        return stock(self, op, args, *rest)

    return [SetAttribute(OpDispatcher, stock.__name__, results)]


def random_state(device_type: str) -> torch.Tensor:
    """The state of the generator that operators of a device type use by default, as bytes on the CPU."""
    if device_type == "cpu":
        return torch.get_rng_state()
    state: torch.Tensor = torch.get_device_module(device_type).get_rng_state()
    return state.cpu()
