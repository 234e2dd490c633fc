"""Writes to a view whose elements were gathered: they reach the tensor that it is a view of.

A slice, a select or a diagonal along a sharded dimension is computed from the gathered tensor, so what
is written to it would be lost. Here the write is done to the whole, and each rank keeps its part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from dynamo_dist.torch_compat import dtensor_specs
from dynamo_dist.torch_compat.patching import Change, SetAttribute

_AUGMENTED = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
# Ends of names of what changes a tensor in place but writes none of its elements.
_OTHER = (
    *("squeeze_", "t_", "transpose_", "swapaxes_", "swapdims_", "resize_", "strided_", "set_"),
    *("detach_", "requires_grad_", "resize_as_", "resize_as_sparse_", "resize_and_clear_"),
)


def writing(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The method ``stock``, which writes to its tensor, also for gathered views of a DTensor."""

    @functools.wraps(stock)
    def write(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if not self._is_view() or not is_cut_off(self):
            return stock(self, *args, **kwargs)
        return write_through(self, stock, args, kwargs)

    return write


def is_cut_off(view: DTensor) -> bool:
    """Return whether a view of a DTensor has memory of its own."""
    base = view._base
    return isinstance(base, DTensor) and not dtensor_specs.share_memory(
        view._local_tensor, base._local_tensor
    )


def write_through(
    view: DTensor, stock: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor:
    """Write to a copy of ``view``, put that in its place in the whole base, and the base's part back."""
    base, mesh = view._base, view.device_mesh
    assert isinstance(base, DTensor)
    written: Any = view.clone()
    stock(written, *args, **kwargs)
    everywhere = [Replicate()] * mesh.ndim
    whole, part = (each.redistribute(placements=everywhere).to_local() for each in (base, written))
    with torch.no_grad():
        count = torch.arange(whole.numel(), device=whole.device).view(whole.shape)
        places = torch.empty_strided(
            whole.shape, base.stride(), dtype=count.dtype, device=count.device
        )
        at = view._view_func_unsafe(places.copy_(count)).reshape(-1)
    changed = whole.reshape(-1).scatter(0, at, part.reshape(-1)).view(whole.shape)
    base.copy_(DTensor.from_local(changed, mesh, everywhere, run_check=False))
    with torch.no_grad():
        view._local_tensor.copy_(written.redistribute(placements=view.placements)._local_tensor)
    return view


def set_item(stock: Callable[..., Any]) -> Callable[..., Any]:
    """``x[key] = value``: to a view, which torch writes to without calling a method, unless by tensors."""

    @functools.wraps(stock)
    def assign(self: DTensor, key: Any, value: Any) -> None:
        keys = key if isinstance(key, tuple) else (key,)
        kinds = (int, slice, torch.SymInt)
        basic = all(each is None or each is ... or type(each) in kinds for each in keys)
        replicated = all(isinstance(each, Replicate) for each in self.placements)
        if not basic or (replicated and not self._is_view()):
            return stock(self, key, value)
        view = self[key]
        if not isinstance(view, DTensor) or not view._is_view() or not is_cut_off(view):
            return stock(self, key, value)
        if isinstance(value, torch.Tensor):
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
        op = getattr(torch.ops.aten, name, None)
        if name.endswith("_") and not name.startswith("_") and not name.endswith(_OTHER) and op:
            found.append(name)
    return [name for name in found if hasattr(torch.Tensor, name)]


def writes_changes() -> list[Change]:
    """List the changes that enabling makes for DTensor's writes."""
    return [
        *(SetAttribute(DTensor, name, writing(getattr(torch.Tensor, name))) for name in methods()),
        SetAttribute(DTensor, "__setitem__", set_item(torch.Tensor.__setitem__)),
    ]
