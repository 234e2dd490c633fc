"""Ways between placements, searched once."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed.tensor._redistribute as _redistribute

from dynamo_dist.torch_compat.changes import Change, SetAttribute
from inductor_passes.torch_compat.rank_reads import as_a_key

KEPT_REDISTRIBUTIONS = 16_384


def remember_redistributions() -> list[Change]:
    """While tracing, look for the way from one layout to another once.

    A strategy asks it of every layout of every argument. Stock remembers in eager alone, because sizes may be
    symbols in a trace; on a mesh of two dimensions the search takes tens of milliseconds where a shard is
    strided. Seen in torch 2.13 to 2.15.
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
        with as_a_key():
            meta, rank = source.tensor_meta, source.mesh.get_rank()
        if meta is None or not all(isinstance(n, int) for n in (rank, *meta.shape, *meta.stride)):
            return stock(source, target, use_graph_based_transform)
        forced = getattr(_redistribute, "_FORCE_MIN_COST_REDISTRIBUTION_PLAN", None)
        return found(source, target, use_graph_based_transform, forced, rank)

    find.cache_clear = found.cache_clear  # type: ignore[attr-defined]
    return [SetAttribute(_redistribute, name, find)]
