"""Sizes of parts: equal ones; or where another rank's plan is followed, as equal as whole rows allow.

A rank that follows may have other rows than the one that planned, or sizes that are symbols. Of ``n`` rows part ``i``
of ``k`` has those from ``n * i // k`` to ``n * (i + 1) // k``: the same on every rank with as many rows, and ``n / k`` each
where ``k`` divides ``n``.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar

import torch

from inductor_passes.torch_compat.sizes import as_number, size_hint, surely_equal

Size = int | torch.SymInt
Shape = tuple[Size, ...]

_unequal: ContextVar[bool] = ContextVar("unequal_parts", default=False)


@contextlib.contextmanager
def unequal_parts() -> Iterator[None]:
    """Within it, parts may be unequal by a row, and sizes may be symbols."""
    token = _unequal.set(True)
    try:
        yield
    finally:
        _unequal.reset(token)


def may_be_unequal() -> bool:
    """Return whether this runs within ``unequal_parts``."""
    return _unequal.get()


def known(shape: Sequence[Size]) -> bool:
    """Return whether no size is a symbol."""
    return all(isinstance(size, int) for size in shape)


def quotient(size: Size, by: Size) -> Size | None:
    """Return ``size / by``; None unless it is surely whole."""
    if isinstance(by, int) and by < 1:
        return None
    found = as_number(size // by)
    return found if surely_equal(found * by, size) else None


def has_pieces(dim: int, outer: int, shape: Sequence[Size], parts: int) -> bool:
    """Return whether a dimension of ``outer`` blocks has ``parts`` parts in each, none of them empty."""
    rows = quotient(shape[dim], outer) if 0 <= dim < len(shape) else None
    if rows is None:
        return False
    if may_be_unequal():
        return size_hint(rows) >= parts
    return isinstance(rows, int) and rows > 0 and rows % parts == 0


def are_equal(size: Size, parts: int) -> bool:
    """Return whether all parts of so many rows surely have the same size."""
    return isinstance(size, int) and size % parts == 0


def volume(shape: Sequence[Size]) -> Size:
    """Return the number of elements."""
    return as_number(math.prod(shape))


def is_broadcast(size: Size) -> bool:
    """Return whether a dimension of an operand is one element that all read."""
    return isinstance(size, int) and size == 1
