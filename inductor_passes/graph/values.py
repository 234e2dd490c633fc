"""Fake values of nodes that a rewrite makes in number: what the same operator makes of equal inputs is worked out once."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from inductor_passes.graph.edit import computed, tensor, value
from inductor_passes.torch_compat.tracing import with_memory_of, with_memory_of_its_own


class Values:
    """Fake values as ``edit.computed`` finds them.

    Each has memory of its own where its operator makes new memory, and its first input's where it is a view of that.
    """

    def __init__(self) -> None:
        # The value, and for a view how many elements behind the start of its input it starts.
        self._known: dict[object, tuple[torch.Tensor, int | None]] = {}

    def of(self, node: fx.Node) -> Any:
        """Return the value of a node, from those of its inputs."""
        if not _makes_one_value(node.target):
            return computed(node)
        key = node.target, _key_of(node.args), _key_of(node.kwargs)
        source = tensor(node.args[0]) if node.args else None
        if key in self._known:
            known, behind = self._known[key]
            if behind is None:
                return with_memory_of_its_own(known)
            assert source is not None
            made = with_memory_of(known, source, behind)
            return computed(node) if made is None else made
        found = computed(node)
        if not isinstance(found, torch.Tensor) or not _is_static(found):
            return found
        if source is not None and _is_static(source) and _shares_memory(found, source):
            behind = int(found.storage_offset()) - int(source.storage_offset())
            self._known[key] = found, behind
        elif _makes_memory(node.target):
            self._known[key] = found, None
        return found


def _is_static(tensor: torch.Tensor) -> bool:
    numbers = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
    return all(isinstance(each, int) for each in numbers)


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return one.untyped_storage()._cdata == other.untyped_storage()._cdata
    except NotImplementedError:  # a wrapper subclass or an opaque tensor has no storage
        return False


def _makes_one_value(target: object) -> bool:
    """Return whether an operator has one result and writes nothing."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return len(target._schema.returns) == 1 and not target._schema.is_mutable


def _makes_memory(target: object) -> bool:
    """Return whether an operator's result lies in new memory, by its schema."""
    assert isinstance(target, torch._ops.OpOverload)
    return target._schema.returns[0].alias_info is None


def _key_of(given: Any) -> object:
    """All of an argument that a value's shape can depend on, hashable."""
    if isinstance(given, fx.Node):
        return _key_of(value(given))
    if isinstance(given, torch.Tensor):
        return given.dtype, _key_of(tuple(given.shape)), _key_of(given.stride()), given.device
    if isinstance(given, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return type(given), given.node.expr
    if isinstance(given, (list, tuple)):
        return tuple(map(_key_of, given))
    if isinstance(given, dict):
        return tuple((name, _key_of(each)) for name, each in given.items())
    return type(given), given
