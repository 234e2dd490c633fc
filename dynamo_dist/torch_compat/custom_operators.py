"""Operators of others: which are made by ``torch.library.custom_op``."""

from __future__ import annotations

from torch._ops import OpOverload, OpOverloadPacket

OPERATORS = (OpOverload, OpOverloadPacket)


def is_custom_op(name: str) -> bool:
    """Return whether ``torch.library.custom_op`` made the operator, so that its schema is checked.

    Its implementations run below autograd anyway. ``OPDEFS`` was seen in 2.13 to 2.15.
    """
    from torch._library import custom_ops

    return name in getattr(custom_ops, "OPDEFS", ())
