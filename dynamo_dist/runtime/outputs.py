"""Wrap what a compiled graph returns in DTensors, and call its operators below autograd."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat import aot_runtime, dtensor_dispatch, inductor_code
from dynamo_dist.torch_compat.patching import Change, OwnState
from dynamo_dist.tracing.operators import NAMESPACE
from inductor_passes.inductor.session_in_work import has_trait

# A trait of a compile; in option ``disable``: operators keep autograd's kernels.
BELOW_AUTOGRAD = "below_autograd"
_OPERATOR = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)")
# Operators whose autograd kernels record gradients and do nothing else.
_KNOWN = frozenset(("aten", "prims", "inductor", "_c10d_functional", "_dtensor", NAMESPACE))


def below_autograd_changes() -> list[Change]:
    """List the changes that enabling makes; compiles with the trait gain by them."""
    return inductor_code.wrap_compiled_code(_lower)


def _lower(call: Callable[..., Any], source: str) -> Callable[..., Any]:
    if not has_trait(BELOW_AUTOGRAD) or not all(
        namespace in _KNOWN or dtensor_dispatch.is_custom_op(f"{namespace}::{name}")
        for namespace, name in _OPERATOR.findall(source)
    ):
        return call

    @functools.wraps(call)
    def below(*args: Any) -> Any:
        with inductor_code.below_autograd():
            return call(*args)

    return below


# Compiled graphs that are gone leave their entries, which hold meshes: beyond this many, and when the
# plugin is disabled, all are dropped.
_MOST = 16384


class _Made(NamedTuple):
    flatten_spec: object  # held, so that its id is not given to another
    mesh: object
    size: Any
    stride: Any
    spec: Any
    requires_grad: bool


_made: dict[int, _Made] = {}


def wrapping_changes() -> list[Change]:
    """List the changes to apply while the plugin is enabled."""
    return [aot_runtime.wrap_with(unflatten), _Forget()]


class _Forget(OwnState):
    """Undone with the rest: what was made while enabled is held no longer."""

    def apply(self) -> None:
        _made.clear()

    def undo(self) -> None:
        _made.clear()


def unflatten(
    inner_tensors: dict[str, Any],
    flatten_spec: Any,
    outer_size: Any,
    outer_stride: Any,
    *,
    stock: Callable[..., DTensor] = aot_runtime.stock_unflatten,
) -> DTensor:
    """A DTensor of these global sizes around ``inner_tensors["_local_tensor"]``, first made by ``stock``.

    ``flatten_spec`` is one object for each output of a compiled graph, which makes it the key.
    """
    mesh = inner_tensors.get("device_mesh")
    known = _made.get(id(flatten_spec))
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
    made = stock(inner_tensors, flatten_spec, outer_size, outer_stride)
    # While tracing, sizes are symbols and tensors are fake: those specs are for that moment.
    if type(made._local_tensor) is torch.Tensor and all(
        type(number) is int for number in (*outer_size, *outer_stride)
    ):
        if len(_made) >= _MOST:
            _made.clear()
        _made[id(flatten_spec)] = _Made(
            flatten_spec, mesh, outer_size, outer_stride, made._spec, made.requires_grad
        )
    return made
