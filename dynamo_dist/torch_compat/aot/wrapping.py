"""DTensors made around what a graph returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat.changes import Change, WrapAttribute


def wrap_with(unflatten: Callable[..., DTensor]) -> Change:
    """``unflatten`` becomes ``DTensor.__tensor_unflatten__``, and gets the one before as ``stock``."""
    return WrapAttribute(
        DTensor,
        "__tensor_unflatten__",
        lambda stock: staticmethod(functools.partial(unflatten, stock=stock)),
    )


stock_unflatten: Callable[..., DTensor] = DTensor.__tensor_unflatten__
# ``dtensor(local, spec, requires_grad=...)``, without an initializer that does nothing but take time.
_new: Any = getattr(torch.Tensor, "_dtensor__new__", None)
dtensor: Callable[..., DTensor] = DTensor if _new is None else functools.partial(_new, DTensor)
Wrap = Callable[[tuple[Any, ...]], tuple[Any, ...]]
