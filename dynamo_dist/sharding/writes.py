"""Calls that write: to a view whose elements were gathered, or in place where placements differ.

A slice, a select or a diagonal along a sharded dimension is computed from the gathered tensor, so
what is written to it would be lost. Here the write is done to the whole, and each rank keeps its
part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs, dtensor_strategies
from dynamo_dist.torch_compat.patching import Patch, SetAttribute

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


def number(
    op: dtensor_specs.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    """The number that a DTensor of one element stands for, read or checked: sums finished,
    shards gathered.
    """
    tensor, *rest = args
    assert isinstance(tensor, DTensor)
    whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
    return op(whole._local_tensor, *rest, **kwargs)


def resized(op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """The first elements in memory are kept: of the whole tensor, which every rank has from then
    on.
    """
    target, *rest = args
    everywhere = [Replicate()] * target.device_mesh.ndim
    local = op(target.redistribute(placements=everywhere)._local_tensor, *rest, **kwargs)
    meta = dtensor_specs.TensorMeta(local.shape, local.stride(), local.dtype)
    found = dtensor_specs.wrap(local, target.device_mesh, everywhere, meta)
    return dtensor_specs.adopt(op, args, kwargs, target, found)


def times_number(
    op: dtensor_specs.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """As of a tensor: autograd's own ``mul.Scalar`` has complex factors, which eager's cache
    cannot hold.
    """
    return torch.ops.aten.mul.Tensor(*args, **kwargs)


times_number.forwards = True  # type: ignore[attr-defined]  # the planner plans what it calls


def in_place_patches() -> list[Patch]:
    """List the patches that enabling makes for calls that are answered before any strategy."""
    return [
        *(
            patch
            for name, view in VIEWS.items()
            for op, functional in zip(
                dtensor_dispatch.overloads(name), dtensor_dispatch.overloads(view), strict=True
            )
            for patch in dtensor_strategies.on_dispatch(op, as_view(functional))
        ),
        *dtensor_strategies.on_dispatch(torch.ops.aten.resize_.default, resized),
        *dtensor_strategies.on_dispatch(torch.ops.aten.mul.Scalar, times_number),
        *(
            patch
            for name in NUMBERS
            for op in dtensor_dispatch.overloads(name)
            for patch in dtensor_strategies.on_dispatch(op, number)
        ),
    ]


_AUGMENTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
# Ends of names of what changes a tensor in place but writes none of its elements.
_OTHER = (
    *("squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_", "strided_", "set_"),
    *("detach_", "requires_grad_", "resize_as_", "resize_as_sparse_", "resize_and_clear_"),
)


def writing(upstream: Callable[..., object]) -> Callable[..., object]:
    """The method ``upstream``, which writes to its tensor, also for gathered views of a DTensor."""

    @functools.wraps(upstream)
    def write(self: DTensor, *args: object, **kwargs: object) -> object:
        # A view that shares memory with its base needs nothing: each rank writes to its own part.
        if not self._is_view() or not is_cut_off(self):
            return upstream(self, *args, **kwargs)
        return write_through(self, upstream, args, kwargs)

    return write


def is_cut_off(view: DTensor) -> bool:
    """Return whether a view of a DTensor has memory of its own."""
    base = view._base
    return isinstance(base, DTensor) and not dtensor_specs.share_memory(
        view._local_tensor, base._local_tensor
    )


def write_through(
    view: DTensor,
    upstream: Callable[..., object],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> DTensor:
    """Write to a copy of ``view``, put that in its place in the whole base, and the base's part
    back.
    """
    base, mesh = view._base, view.device_mesh
    assert isinstance(base, DTensor)
    # A copy, so that what upstream raises leaves view and base as they were.
    written: Any = view.clone()
    upstream(written, *args, **kwargs)
    everywhere = [Replicate()] * mesh.ndim
    whole, part = (each.redistribute(placements=everywhere).to_local() for each in (base, written))
    with torch.no_grad():
        # The number of each element, laid out as the base: the view of these numbers says which
        # elements it covers.
        count = torch.arange(whole.numel(), device=whole.device).view(whole.shape)
        places = torch.empty_strided(
            whole.shape, base.stride(), dtype=count.dtype, device=count.device
        )
        at = view._view_func_unsafe(places.copy_(count)).reshape(-1)
    # Not in place: ``whole`` may be the base's own memory, which autograd has to see written to.
    changed = whole.reshape(-1).scatter(0, at, part.reshape(-1)).view(whole.shape)
    # Autograd records the write as one to the base, with the gradients of both.
    base.copy_(DTensor.from_local(changed, mesh, everywhere, run_check=False))
    with torch.no_grad():
        view._local_tensor.copy_(written.redistribute(placements=view.placements)._local_tensor)
    return view


def set_item(upstream: Callable[..., Any]) -> Callable[..., object]:
    """``x[key] = value``: to a view, which torch writes to without calling a method, unless by
    tensors.
    """

    @functools.wraps(upstream)
    def assign(self: DTensor, key: Any, value: Any) -> None:
        keys = key if isinstance(key, tuple) else (key,)
        kinds = (int, slice, torch.SymInt)
        # Indices that are tensors go to index_put_, which has a strategy and writes to the tensor
        # itself.
        basic = all(each is None or each is ... or type(each) in kinds for each in keys)
        replicated = all(isinstance(each, Replicate) for each in self.placements)
        if not basic or (replicated and not self._is_view()):
            return upstream(self, key, value)
        view = self[key]
        if not isinstance(view, DTensor) or not view._is_view() or not is_cut_off(view):
            return upstream(self, key, value)
        if isinstance(value, torch.Tensor):
            # Leading dimensions of size 1 are dropped, as eager's assignment does; copy_ would
            # refuse them.
            while value.ndim > view.ndim and value.shape[0] == 1:
                value = value[0]
            view.copy_(value)
        else:
            view.fill_(value)
        return None

    return assign


def methods() -> list[str]:
    """Methods of tensors that write to them, those of ``x += y`` among them."""
    found = [f"__i{name}__" for name in _AUGMENTED]
    for name in dir(torch.Tensor):
        in_place = name.endswith("_") and not name.startswith("_") and not name.endswith(_OTHER)
        if in_place and hasattr(torch.ops.aten, name):
            found.append(name)
    return [name for name in found if hasattr(torch.Tensor, name)]


def writes_patches() -> list[Patch]:
    """List the patches that enabling makes for DTensor's writes."""
    return [
        *(SetAttribute(DTensor, name, writing(getattr(torch.Tensor, name))) for name in methods()),
        SetAttribute(DTensor, "__setitem__", set_item(torch.Tensor.__setitem__)),
    ]
