"""Calls of operators on DTensors: who dispatches and propagates, and trees of arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils import _pytree

tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only
# An OpStrategy, or a TupleStrategy for operators on lists.
Strategy = Callable[[OpSchema], Any]
Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def dispatcher() -> Any:
    """The one ``OpDispatcher`` of the process."""
    return DTensor._op_dispatcher


def propagator() -> Any:
    """The one ``ShardingPropagator`` of the process."""
    return dispatcher().sharding_propagator
