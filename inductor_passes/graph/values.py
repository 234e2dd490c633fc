"""Fake values of nodes that a rewrite makes in number: what the same operator makes of equal inputs is worked out once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from inductor_passes.graph.edit import computed, value
from inductor_passes.torch_compat.tracing import with_memory_of_its_own


class Values:
    """Fake values as ``edit.computed`` finds them; each has memory of its own where its operator makes new memory."""

    def __init__(self) -> None:
        self._known: dict[object, torch.Tensor] = {}

    def of(self, node: fx.Node) -> Any:
        """Return the value of a node, from those of its inputs."""
        if not _makes_memory(node.target):
            return computed(node)
        key = node.target, _said(node.args), _said(node.kwargs)
        if key in self._known:
            return with_memory_of_its_own(self._known[key])
        found = computed(node)
        if isinstance(found, torch.Tensor) and all(isinstance(s, int) for s in found.shape):
            self._known[key] = found
        return found


def _makes_memory(target: object) -> bool:
    """Return whether an operator's one result lies in new memory, by its schema."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is None and not target._schema.is_mutable


def _said(given: Any) -> object:
    """All of an argument that a value's shape can depend on, hashable."""
    if isinstance(given, fx.Node):
        return _said(value(given))
    if isinstance(given, torch.Tensor):
        return given.dtype, _said(tuple(given.shape)), _said(given.stride()), given.device
    if isinstance(given, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(given), given.node.expr
    if isinstance(given, (list, tuple)):
        return tuple(map(_said, given))
    if isinstance(given, dict):
        return tuple((name, _said(each)) for name, each in given.items())
    return type(given), given
