"""Memory that two tensors may share, as far as sizes and strides tell."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage())


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two stand-ins share memory; True where symbolic sizes or strides leave it open."""
    try:
        if not _same_storage(a, b):
            return False
    except NotImplementedError:  # no storage: a subclass's wrapper
        return a is b
    if a.dtype != b.dtype and a.element_size() != b.element_size():
        return True
    return _ranges_meet(_extent(a), _extent(b)) and not _apart_in_a_dimension(a, b)


def _extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First and last element within the storage; None if not known while tracing."""
    if not all(
        isinstance(n, int) for n in (tensor.storage_offset(), *tensor.shape, *tensor.stride())
    ):
        return None
    if tensor.numel() == 0:
        return (0, -1)
    first: Any = tensor.storage_offset()
    last = first + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first, last


def _ranges_meet(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    if a is None or b is None:
        return True
    return a[0] <= a[1] and b[0] <= b[1] and a[0] <= b[1] and b[0] <= a[1]


def _apart_in_a_dimension(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether equal strides show two slices of one tensor to be disjoint, such as column blocks."""
    if a.stride() != b.stride() or _extent(a) is None or _extent(b) is None:
        return False
    at, bt = a.storage_offset(), b.storage_offset()
    for step, n, m in sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True):
        if step <= 0:
            return False
        start, other = at // step, bt // step
        if start + n <= other or other + m <= start:
            return True
        at, bt = at % step, bt % step
    return False
