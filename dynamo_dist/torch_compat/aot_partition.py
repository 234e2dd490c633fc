"""AOTAutograd's partition of the joint graph, its random operators, and its marks on gathers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.compile_utils as _compile_utils
import torch._functorch.partitioners as _partitioners
import torch._prims.rng_prims as _rng_prims
import torch.fx.traceback as _traceback
from torch import fx
from torch._functorch import config as functorch_config
from torch._library.fake_class_registry import FakeScriptObject
from torch.utils.checkpoint import CheckpointPolicy

from dynamo_dist.torch_compat.patching import (
    Patch,
    SetAttribute,
    Upstream,
    WrapAttribute,
    WrapFunction,
    has,
)
from inductor_passes.rewrite.bucket import GATHERED_FOR

_LAUNCHING = ("_c10d_functional", "_dtensor")  # namespaces of torch's ops that communicate


def keep_in_its_pass(own: str) -> list[Patch]:
    """Keep launches in the pass, forward or backward, that launched them, and launch them once.

    The partitioner copies into the backward whatever it can compute there, dead launches too, and
    moves to the forward what does not depend on a gradient. What it can compute where depends on
    sizes, which are other ones on another rank. ``own`` is the namespace of our ops, which it takes
    for ops without effects. Seen in 2.13 to 2.15; where the predicates are missing nothing is
    changed.
    """
    parts = {"_must_be_in_forward": "forward", "_must_be_in_backward": "backward"}
    # A tag decides, and nothing that depends on sizes: what one rank moves all ranks move.
    off = "launches may move from forward to backward, on this rank alone"
    if not has(_partitioners, "_has_tag_is_forward", *parts, off=off):
        return []
    return [
        SetAttribute(
            _partitioners, name, functools.partial(_kept, getattr(_partitioners, name), own, part)
        )
        for name, part in parts.items()
    ]


def _kept(upstream: Callable[[object], bool], own: str, part: str, node: fx.Node) -> bool:
    namespace, tag = getattr(node.target, "namespace", None), node.meta.get("partitioner_tag")
    if namespace == own:
        # What an autograd function traced in its backward may bear no tag; all of the forward does.
        return (tag in ("is_forward", "must_be_in_forward")) == (part == "forward")
    # A gather that is to be recomputed belongs to the backward, whatever its tag says.
    if namespace in _LAUNCHING and not _partitioners.must_recompute(node):
        return tag == f"is_{part}" or upstream(node)
    return upstream(node)


def drop_dead_chains() -> list[Patch]:
    """Let the partitioner drop the computation between dead launches, and so the launches before
    it.

    It copies into the backward what it can compute there, and drops the launches that are dead.
    What is no launch it keeps, dead or not, so that a launch whose result goes into a dead one
    would run twice. Seen in 2.13 to 2.15; where the predicate is missing nothing is changed.
    """
    if not has(_partitioners, "is_not_collective", off="some dead launches run"):
        return []
    # A node that is impure is kept anyway; only a pure chain between dead collectives may go.
    upstream = _partitioners.is_not_collective
    return [
        SetAttribute(
            _partitioners, "is_not_collective", lambda node: upstream(node) and node.is_impure()
        )
    ]


def save_states_before_objects() -> list[Patch]:
    """Random states that a backward graph replays stand before the objects that it needs.

    The runtime reads back what a forward graph saves by position: tensors, objects such as a
    DeviceMesh, sizes. Upstream adds the states after the objects, where the runtime takes a mesh
    for a tensor. Seen in 2.13 to 2.15.
    """

    def functionalize(
        upstream: Upstream, joint: Any, forward: Any, backward: Any, last: int
    ) -> object:
        inputs = backward.graph.find_nodes(op="placeholder")
        tangent = next((node for node in inputs if "tangent" in node.name), None)
        # Inputs in front of the first tangent are what the forward saved; the order among them is
        # the runtime's.
        saved = inputs[: inputs.index(tangent)] if tangent is not None else []
        objects = [node for node in saved if _is_object(node)]
        # Upstream puts the states in front of so many last values: the sizes, and now the objects.
        forward, backward = upstream(joint, forward, backward, last + len(objects))
        for node in objects:
            tangent.prepend(node)  # type: ignore[union-attr]
        backward.recompile()
        return forward, backward

    return [WrapFunction(_partitioners, "functionalize_rng_ops", functionalize)]


def _is_object(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), FakeScriptObject)


def draw_once() -> list[Patch]:
    """Draws of DTensors on CUDA are neither merged nor repeated, which would change what is drawn.

    They are calls of one higher-order operator, without the tag by which AOTAutograd knows random
    operators: it merges two draws of equal arguments into one, and in a checkpointed block draws
    anew for the backward. Its results are saved instead. Seen in 2.13 to 2.15.
    """
    operator = _rng_prims.run_dtensor_rng_op

    def force_save(upstream: Upstream, joint: fx.GraphModule) -> None:
        upstream(joint)
        for node in joint.graph.find_nodes(op="call_function", target=operator):
            # The partitioner saves tensors: of an operator with several results these are the
            # getitem nodes.
            items = node.users if isinstance(node.meta.get("val"), (tuple, list)) else ()
            for each in (node, *items):
                each.meta["recompute"] = CheckpointPolicy.MUST_SAVE

    return [
        WrapFunction(_partitioners, "force_save_effectful_ops", force_save),
        # The table that AOTAutograd's elimination of common subexpressions reads: what stands there
        # is never merged.
        WrapAttribute(_compile_utils, "rand_ops", lambda upstream: [*upstream, operator]),
    ]


@contextlib.contextmanager
def traced_with(**marks: object) -> Iterator[None]:
    """What AOTAutograd traces in the block has these in its nodes' metadata."""
    meta = _traceback.get_current_meta()
    # The dictionary is torch's, shared by all that traces in this thread, so it is changed and put
    # back in place.
    before = {name: meta[name] for name in marks if name in meta}
    meta.update(marks)
    try:
        yield
    finally:
        for name in marks:
            meta.pop(name, None)
        meta.update(before)


def gathered(group: str, *, again: bool) -> contextlib.AbstractContextManager[None]:
    """Mark what AOTAutograd traces in the block as the gather of a parameter of ``group``, or the
    reduction of its gradient.

    ``again``: its result is not kept for backward, which computes it again, as in a checkpoint.
    """
    marks: dict[str, object] = {"recompute": CheckpointPolicy.MUST_RECOMPUTE} if again else {}
    if group:
        # Annotations of the program stand in the same entry and have to survive.
        custom = _traceback.get_current_meta().get("custom") or {}
        marks["custom"] = {**custom, GATHERED_FOR: group}
    return traced_with(**marks)


def recomputing_in_our_pass(gm: fx.GraphModule) -> contextlib.AbstractContextManager[object]:
    """Leave it to our pass to compute again, in a graph with a backward in it, what is tagged so.

    Torch's refuses several backwards, and random operators in a checkpoint. Seen in 2.13 to 2.15.
    """
    backwards = gm.graph.find_nodes(op="call_function", target=torch.autograd.grad)
    if not backwards or not hasattr(functorch_config, _REMAT):
        return contextlib.nullcontext()
    patched: contextlib.AbstractContextManager[object] = functorch_config.patch(_REMAT, False)
    return patched


_REMAT = "remat_using_tags_for_fwd_loss_bwd_graph"
