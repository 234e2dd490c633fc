"""Run around each call of a compiled graph: one input for each object, and outputs wrapped in
DTensors.

A compiled graph runs where no gradient is recorded, so autograd's kernels of its operators do
nothing but take time: for each functional collective and each wait, several calls of Python
functions, which cost as much again as everything else that the host does for a layer.

Dynamo makes an input of every place that it read a mesh from, such as each hook of a tensor
parallel style, and loads all of them for every call.

AOTAutograd looks for memory that plain inputs share, and takes a DTensor's for its own: what is
written through one is not seen through the other.

A compiled training step wraps every gradient on every call. Size, stride and placements are the
same each time, so the spec can be as well.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from dynamo_dist.errors import DTensorError
from dynamo_dist.torch_compat import aot_runtime, dtensor_dispatch, dynamo_building, inductor_code
from dynamo_dist.torch_compat.dtensor_specs import may_overlap
from dynamo_dist.torch_compat.patching import OwnState, Patch
from dynamo_dist.tracing.operators import NAMESPACE
from inductor_passes.extension import has_trait


def merge_inputs(
    gm: fx.GraphModule, inputs: Sequence[object], known: Mapping[object, object]
) -> list[object]:
    """Remove placeholders of ``gm`` that hold what an earlier one holds; the inputs that are left.

    ``known``: sources that are guarded by identity, with what they are.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    # Placeholders and inputs are paired by position, which holds for graphs as Dynamo makes them.
    if len(placeholders) != len(inputs) or not dynamo_building.inputs_follow(gm):
        return list(inputs)
    first: dict[int, fx.Node] = {}
    left = []
    for node, given in zip(placeholders, inputs, strict=True):
        source = dynamo_building.source_of_input(node)
        # Only objects that are guarded by identity: two inputs that hold one object now may hold
        # two in the next call.
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
    # AOTAutograd's own search for shared memory compares wrappers, whose storages are none.
    local = [each._local_tensor for each in given if isinstance(each, DTensor)]
    shared = [b for b in local if any(may_overlap(a, b) for a in plain)]
    if any(may_overlap(_local(written), each) for written in targets for each in shared):
        raise DTensorError(
            "A compiled function is given a DTensor and a plain tensor of the same memory, and "
            "writes to it.",
            "What is written through one of them would not be seen through the other.",
            "Take the local tensor inside the compiled function, x.to_local(), or give it a copy, "
            "local.clone().",
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
    # Dynamo's graph has Python functions and method names, no schemas that would say what is
    # written.
    name = dynamo_building.target_name(node)
    return (
        name == "setitem"
        or name.startswith(("iadd", "isub", "imul", "itruediv", "ipow"))
        # Torch's convention for methods in place; ``__get__`` and the like are none.
        or (name.endswith("_") and not name.endswith("__"))
    )


# A trait of a compile; in option ``disable``: operators keep autograd's kernels.
BELOW_AUTOGRAD = "below_autograd"
_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)")
# Operators whose autograd kernels record gradients and do nothing else.
_KNOWN = frozenset(("aten", "prims", "inductor", "_c10d_functional", "_dtensor", NAMESPACE))


def below_autograd_patches() -> list[Patch]:
    """List the patches that enabling makes; compiles with the trait gain by them."""
    return inductor_code.wrap_compiled_code(_lower)


def _lower(call: Callable[..., Any], source: str) -> Callable[..., Any]:
    if not has_trait(BELOW_AUTOGRAD) or not all(
        namespace in _KNOWN or dtensor_dispatch.is_custom_op(f"{namespace}::{name}")
        # An operator of others may do more in its autograd kernel than record: one such keeps all
        # as it is.
        for namespace, name in _OPERATOR.findall(source)
    ):
        return call

    @functools.wraps(call)
    def below(*args: Any) -> Any:
        # A compiled graph runs inside an autograd function or under no_grad, so nothing is recorded
        # in any case.
        with inductor_code.below_autograd():
            return call(*args)

    return below


# Compiled graphs that are gone leave their entries, which hold meshes: beyond this many, and when
# the plugin is disabled, all are dropped.
_MOST_SPECS = 16384


class _KnownSpec(NamedTuple):
    flatten_spec: object  # held, so that its id is not given to another
    mesh: object
    size: Any
    stride: object
    spec: object
    requires_grad: bool


_specs: dict[int, _KnownSpec] = {}


def wrapping_patches() -> list[Patch]:
    """List the changes to apply while the plugin is enabled."""
    return [aot_runtime.wrap_with(unflatten), _Forget()]


class _Forget(OwnState):
    """Undone with the rest: what was made while enabled is held no longer."""

    def apply(self) -> None:
        _specs.clear()

    undo = apply


def unflatten(
    inner_tensors: Mapping[str, object],
    flatten_spec: Any,
    outer_size: Any,
    outer_stride: Any,
    *,
    upstream: Callable[..., DTensor] = aot_runtime.upstream_unflatten,
) -> DTensor:
    """A DTensor of these global sizes around ``inner_tensors["_local_tensor"]``, first made by
    ``upstream``.

    ``flatten_spec`` is one object for each output of a compiled graph, which makes it the key.
    """
    mesh = inner_tensors.get("device_mesh")
    # The id alone is not enough: the object is compared below, as the entry keeps it alive.
    known = _specs.get(id(flatten_spec))
    if (
        known is not None
        and known.flatten_spec is flatten_spec
        and known.mesh is mesh
        and known.size == outer_size
        and known.stride == outer_stride
    ):
        return aot_runtime.dtensor(
            inner_tensors["_local_tensor"], known.spec, requires_grad=known.requires_grad
        )
    made = upstream(inner_tensors, flatten_spec, outer_size, outer_stride)
    # While tracing, sizes are symbols and tensors are fake: those specs are for that moment.
    if type(made._local_tensor) is torch.Tensor and all(
        type(number) is int for number in (*outer_size, *outer_stride)
    ):
        # All at once: which graphs are gone cannot be told, and the next call of each makes its
        # entry again.
        if len(_specs) >= _MOST_SPECS:
            _specs.clear()
        _specs[id(flatten_spec)] = _KnownSpec(
            flatten_spec, mesh, outer_size, outer_stride, made._spec, made.requires_grad
        )
    return made
