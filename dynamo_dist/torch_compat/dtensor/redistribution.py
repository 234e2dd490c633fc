"""Ways between placements, searched once."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed.tensor._redistribute as _redistribute
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from dynamo_dist.torch_compat.changes import Change, SetAttribute
from dynamo_dist.torch_compat.dtensor.types import DTensorSpec
from dynamo_dist.torch_compat.probing import _optional_module

KEPT_REDISTRIBUTIONS = 16_384


def remember_redistributions() -> list[Change]:
    """While tracing, look for the way from one layout to another once.

    A strategy asks it of every layout of every argument. Stock remembers in eager alone, because sizes may be
    symbols in a trace; on a mesh of two dimensions the search takes tens of milliseconds where a shard is
    strided. Seen in torch 2.11 to 2.15.
    """
    name = "_gen_transform_infos_non_cached"
    stock = getattr(_redistribute, name, None)
    if stock is None:
        return []

    @functools.lru_cache(maxsize=KEPT_REDISTRIBUTIONS)
    def found(source: Any, target: Any, by_graph: Any, forced: Any, rank: int) -> Any:
        return stock(source, target, by_graph)

    @functools.wraps(stock)
    def find(source: Any, target: Any, use_graph_based_transform: Any = None) -> Any:
        # Shards of uneven sizes differ from rank to rank, and a process may play several.
        meta, rank = source.tensor_meta, source.mesh.get_rank()
        if meta is None or not all(isinstance(n, int) for n in (rank, *meta.shape, *meta.stride)):
            return stock(source, target, use_graph_based_transform)
        forced = getattr(_redistribute, "_FORCE_MIN_COST_REDISTRIBUTION_PLAN", None)
        return found(source, target, use_graph_based_transform, forced, rank)

    return [SetAttribute(_redistribute, name, find)]


def search_decompositions_apart() -> list[Change]:
    """Let the search for an operator's strategy run outside the trace.

    Where an operator has no strategy, DTensor tries every placement on its decomposition with meta
    tensors. While tracing they become fakes, on which the search fails, and it asks past eager's cache,
    so that seconds become minutes. Sizes that are symbols belong to the trace and stay in it. Seen in
    torch 2.12 to 2.15; 2.11 has no such search.
    """
    module = _optional_module("torch.distributed.tensor._decompositions")
    if module is None:
        return []
    stock, is_tracing = module.DecompShardingStrategy.propagate_strategy, module._are_we_tracing
    searches: list[None] = []  # those apart from the trace that are under way

    @functools.wraps(stock)
    def propagate(self: Any, op_schema: Any) -> Any:
        if _has_symbols(op_schema):
            return stock(self, op_schema)
        searches.append(None)
        try:
            with _disable_current_modes():
                return stock(self, op_schema)
        finally:
            searches.pop()

    return [
        SetAttribute(module.DecompShardingStrategy, "propagate_strategy", propagate),
        SetAttribute(module, "_are_we_tracing", lambda: not searches and is_tracing()),
    ]


def _has_symbols(op_schema: Any) -> bool:
    leaves = _pytree.tree_leaves((op_schema.args_schema, op_schema.kwargs_schema))
    sizes = [leaf.shape if isinstance(leaf, DTensorSpec) else [leaf] for leaf in leaves]
    return any(isinstance(size, torch.SymInt) for each in sizes for size in each)
