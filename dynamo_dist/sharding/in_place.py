"""Calls that are answered before any strategy: a shape changed in place, one number read, a factor."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs, dtensor_strategies
from dynamo_dist.torch_compat.patching import Change

VIEWS = {
    "aten.squeeze_.default": "aten.squeeze.default",
    "aten.squeeze_.dim": "aten.squeeze.dim",
    "aten.squeeze_.dims": "aten.squeeze.dims",
    "aten.unsqueeze_.default": "aten.unsqueeze.default",
    "aten.t_.default": "aten.t.default",
    "aten.transpose_.default": "aten.transpose.int",
}
NUMBERS = (
    "aten._local_scalar_dense.default",
    "aten._assert_async.default",
    "aten._assert_async.msg",
)


def as_view(view: dtensor_specs.OpOverload) -> dtensor_dispatch.Handler:
    """The DTensor becomes what ``view`` gives: local tensor, layout and global shape."""

    def handler(op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return dtensor_specs.adopt(op, args, kwargs, args[0], view(*args, **kwargs))

    return handler


def number(op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The number that a DTensor of one element stands for, read or checked: sums finished, shards gathered."""
    tensor, *rest = args
    assert isinstance(tensor, DTensor)
    whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return op(whole._local_tensor, *rest, **kwargs)


def resized(op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first elements in memory are kept: of the whole tensor, which every rank has from then on."""
    target, *rest = args
    everywhere = [Replicate()] * target.device_mesh.ndim
    local = op(target.redistribute(placements=everywhere)._local_tensor, *rest, **kwargs)
    meta = dtensor_specs.TensorMeta(local.shape, local.stride(), local.dtype)
    found = dtensor_specs.wrap(local, target.device_mesh, everywhere, meta)
    return dtensor_specs.adopt(op, args, kwargs, target, found)


def times_number(
    op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """As of a tensor: autograd's own ``mul.Scalar`` has complex factors, which eager's cache cannot hold."""
    return torch.ops.aten.mul.Tensor(*args, **kwargs)


times_number.forwards = True  # type: ignore[attr-defined]  # the planner plans what it calls


def in_place_changes() -> list[Change]:
    """List the changes that enabling makes for calls that are answered before any strategy."""
    return [
        *(
            change
            for name, view in VIEWS.items()
            for op, functional in zip(
                dtensor_dispatch.overloads(name), dtensor_dispatch.overloads(view), strict=True
            )
            for change in dtensor_strategies.on_dispatch(op, as_view(functional))
        ),
        *dtensor_strategies.on_dispatch(torch.ops.aten.resize_.default, resized),
        *dtensor_strategies.on_dispatch(torch.ops.aten.mul.Scalar, times_number),
        *(
            change
            for name in NUMBERS
            for op in dtensor_dispatch.overloads(name)
            for change in dtensor_strategies.on_dispatch(op, number)
        ),
    ]
