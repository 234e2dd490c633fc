"""What a node of a graph calls, and tensors that are made of others."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def namespace(target: Any) -> str | None:
    """Namespace of an operator or of one of its overloads, such as ``aten``; None for anything else.

    ``torch._ops`` was seen in 2.11 to 2.15.
    """
    if isinstance(target, OpOverload):
        return str(target.namespace)
    if isinstance(target, OpOverloadPacket):
        return str(target._qualified_op_name).partition("::")[0]
    return None


def is_random(target: Any) -> bool:
    """Return whether an overload draws random numbers. ``Tag.nondeterministic_seeded`` was seen in 2.11 to 2.15."""
    return isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def higher_order_name(target: Any) -> str | None:
    """Name of a higher-order operator, such as ``flex_attention``; None for anything else. Seen in 2.11 to 2.15."""
    return str(target.__name__) if isinstance(target, HigherOrderOperator) else None


def wraps_tensors(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is of a type whose operations are those of tensors in it, and others. Seen in 2.11 to 2.15."""
    return bool(is_traceable_wrapper_subclass(tensor))
