"""Values while tracing: texts of trackers, and uses of a tensor's data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.variables.builder as _builder

from dynamo_dist.torch_compat.changes import Change, SetAttribute
from dynamo_dist.torch_compat.dynamo.building import fake_tensor, items_of
from dynamo_dist.torch_compat.overlap import _same_storage, may_overlap

# Calls on a tensor that tell of its sizes, or make one like it, without reading it.
_METADATA = frozenset(
    "size stride dim numel storage_offset is_contiguous new_empty new_zeros new_ones new_full "
    "empty_like zeros_like ones_like full_like rand_like randn_like".split()
)


def fake_tensors(tx: Any, tracker: Any) -> list[torch.Tensor]:
    """The stand-ins of the tensors in a traced list: their sizes, strides and shared storages."""
    return [fake_tensor(item) for item in items_of(tx, tracker)]


def on_tensor_uses(watched: Callable[[Any], list[Any]], used: Callable[..., None]) -> list[Change]:
    """Call ``used(tx, owner)`` where a traced operation reads or writes a watched tensor.

    ``watched(tx)`` gives pairs of a tensor's stand-in and an owner; taking a view is no use. Every
    traced operation passes through ``get_fake_value``, with the stand-ins of its arguments.
    """
    stock: Any = vars(_builder)["get_fake_value"]

    @functools.wraps(stock)
    def get_fake_value(node: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        state = vars(tx.output).get("_dynamo_dist")
        pairs = watched(state) if state is not None else []
        if not pairs:
            return stock(node, tx, *args, **kwargs)
        inputs = [
            arg.meta["example_value"]
            for arg in node.all_input_nodes
            if isinstance(arg.meta.get("example_value"), torch.Tensor)
        ]
        hits = [
            (tensor, tensor._version, owner)
            for tensor in inputs
            for buffer, owner in pairs
            if may_overlap(tensor, buffer)
        ]
        value = stock(node, tx, *args, **kwargs)
        for tensor, version, owner in hits:
            if not _reads_no_data(node, value, tensor) or tensor._version != version:
                used(tx, owner)
        return value

    return [SetAttribute(_builder, "get_fake_value", get_fake_value)]


def _reads_no_data(node: Any, value: Any, of: torch.Tensor) -> bool:
    if getattr(node.target, "__name__", node.target) in _METADATA:
        return True
    results = value if isinstance(value, (list, tuple)) else [value]
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    return bool(tensors) and all(_same_storage(tensor, of) for tensor in tensors)
