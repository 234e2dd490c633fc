"""Values while tracing: texts of trackers, and uses of a tensor's data."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.variables.builder as _builder
from torch.distributed.tensor import DTensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from dynamo_dist.torch_compat.changes import Change, SetAttribute, WrapAttribute
from dynamo_dist.torch_compat.dtensor.calls import tree_leaves
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


def on_sizes_told_by_data(refuse: Callable[[str], None]) -> list[Change]:
    """Call ``refuse(operation)`` where only data tells how large a DTensor is that an operation on DTensors returns.

    Such a size is a symbol that no argument has. DTensor makes one for the global size and another for the local one,
    and Dynamo fails on the first. Indexing by a mask fails sooner or later, by how the mask is laid out.
    ``get_fake_value`` and ``free_unbacked_symbols`` were seen in 2.13 to 2.15.
    """

    def checked(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def get_fake_value(node: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            given = [each.meta.get("example_value") for each in node.all_input_nodes]
            # No tree is looked through where there is none: every operation of every program passes here.
            kinds = (DTensor, list, tuple)
            if not any(isinstance(each, kinds) for each in given) or not any(
                isinstance(each, DTensor) for each in tree_leaves(given)
            ):
                return stock(node, tx, *args, **kwargs)
            if _indexes_by_mask(node):
                refuse("indexing by a mask")
            value = stock(node, tx, *args, **kwargs)
            made = _unbacked([each for each in tree_leaves(value) if isinstance(each, DTensor)])
            if made and made - _unbacked(given):
                refuse(str(getattr(node.target, "__name__", node.target)))
            return value

        return get_fake_value

    return [WrapAttribute(_builder, "get_fake_value", checked)]


def _indexes_by_mask(node: Any) -> bool:
    if getattr(node.target, "__name__", node.target) not in ("getitem", "__getitem__"):
        return False
    values = (getattr(each, "meta", {}).get("example_value") for each in tree_leaves(node.args[1:]))
    return any(
        isinstance(each, torch.Tensor) and each.dtype in (torch.bool, torch.uint8)
        for each in values
    )


def _unbacked(value: Any) -> set[Any]:
    """Return the symbols that only data tells among numbers and sizes, of DTensors globally and of this rank's part."""
    found: set[Any] = set()
    for each in tree_leaves(value):
        sizes: tuple[Any, ...] = (each,)
        if isinstance(each, torch.Tensor):
            sizes = tuple(each.shape)
        if isinstance(each, DTensor):
            sizes += tuple(each._local_tensor.shape)
        for size in sizes:
            if isinstance(size, torch.SymInt):
                found.update(free_unbacked_symbols(size))
    return found


def _reads_no_data(node: Any, value: Any, of: torch.Tensor) -> bool:
    if getattr(node.target, "__name__", node.target) in _METADATA:
        return True
    results = value if isinstance(value, (list, tuple)) else [value]
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    return bool(tensors) and all(_same_storage(tensor, of) for tensor in tensors)
