"""An operator on whole tensors: every rank gathers the arguments and computes the same."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dynamo_dist.errors import StrategyError
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs

# In-place operators that give nothing negative: of anything, of nothing negative, and of nothing negative
# with numbers none of which is.
_NEVER_NEGATIVE = frozenset("abs_ square_ exp_ exp2_ sigmoid_ relu_ zero_".split())
_NOT_OF_ITSELF = frozenset(
    "sqrt_ rsqrt_ pow_ reciprocal_ floor_ ceil_ round_ trunc_ log1p_ expm1_ tanh_ erf_".split()
)
_NOT_WITH_SUCH = frozenset("add_ mul_ div_ clamp_ clamp_min_ clamp_max_ fill_".split())


def run(op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``op`` with each DTensor gathered; results are replicated, arguments written to keep their layout.

    Raises StrategyError for tensors of two meshes, and for a plain tensor among DTensors.
    """
    mesh = mesh_of(op, args, kwargs)
    everywhere = [Replicate()] * mesh.ndim

    def whole(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value.redistribute(placements=everywhere)._local_tensor
        return value

    local_args, local_kwargs = dtensor_dispatch.tree_map(whole, (args, kwargs))
    results = op(*local_args, **local_kwargs)
    written = _write_back(op, args, kwargs, local_args, local_kwargs)

    def wrapped(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in written:
            return written[id(value)]
        meta = dtensor_specs.TensorMeta(value.shape, value.stride(), value.dtype)
        return dtensor_specs.wrap(value, mesh, everywhere, meta)

    return dtensor_dispatch.tree_map(wrapped, results)


def mesh_of(op: dtensor_specs.OpOverload, args: Any, kwargs: Any) -> DeviceMesh:
    """The mesh of the DTensors among the arguments."""
    tensors = [
        v for v in dtensor_dispatch.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)
    ]
    meshes = {t.device_mesh: t for t in tensors if isinstance(t, DTensor)}
    if len(meshes) > 1:
        raise StrategyError(
            f"{op} got DTensors of {len(meshes)} meshes: {', '.join(map(str, meshes))}.",
            "Ranks of different meshes hold different parts, and no collective spans them.",
            "Bring them to one mesh first, e.g. distribute_tensor(x.full_tensor(), mesh, placements).",
        )
    return next(iter(meshes))


def _write_back(
    op: dtensor_specs.OpOverload, args: Any, kwargs: Any, local_args: Any, local_kwargs: Any
) -> dict[int, DTensor]:
    """Give what was written to back to its DTensor; the DTensors by the tensor that was written to."""
    written = {}
    for at, argument in enumerate(op._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if at < len(args):
            before, after = args[at], local_args[at]
        else:
            before, after = kwargs.get(argument.name), local_kwargs.get(argument.name)
        before, after = dtensor_dispatch.tree_leaves(before), dtensor_dispatch.tree_leaves(after)
        for target, local in zip(before, after, strict=True):
            if not isinstance(target, DTensor):
                continue
            _check_writable(op, target, local)
            _check_norm(op, target, (args, kwargs))
            if target._local_tensor is not local:
                mesh = target.device_mesh
                part = dtensor_specs.relayout(local, mesh, [Replicate()] * mesh.ndim, target._spec)
                target._local_tensor.copy_(part)
            written[id(local)] = target
    return written


def _check_writable(op: dtensor_specs.OpOverload, target: DTensor, local: torch.Tensor) -> None:
    if target.shape != local.shape:
        raise StrategyError(
            f"{op} would change the shape of a DTensor in place, from {tuple(target.shape)} to "
            f"{tuple(local.shape)}, in {target.placements}.",
            "Every rank holds its part of a fixed global shape.",
            "Use the operator that returns a new tensor.",
        )


def _check_norm(op: dtensor_specs.OpOverload, target: DTensor, given: Any) -> None:
    """A norm is kept in parts whose powers are summed up: no part can say that it is negative."""
    if not any(dtensor_specs.is_norm(each) for each in target.placements):
        return
    name = op._schema.name.partition("::")[2].removeprefix("_foreach_")
    others = [
        each
        for each in dtensor_dispatch.tree_leaves(given)
        if each is not target and each is not None
    ]
    if name in _NEVER_NEGATIVE | _NOT_OF_ITSELF or (
        name in _NOT_WITH_SUCH and all(_is_not_negative(each) for each in others)
    ):
        return
    raise StrategyError(
        f"{op} would write to a norm that is still pending, in {target.placements}.",
        "What it gives may be negative, which the parts of a norm cannot hold.",
        "Redistribute the norm to Replicate first, or use the operator that returns a new tensor.",
    )


def _is_not_negative(value: Any) -> bool:
    if isinstance(value, DTensor):
        return any(dtensor_specs.is_norm(each) for each in value.placements)
    return isinstance(value, (int, float)) and value >= 0
