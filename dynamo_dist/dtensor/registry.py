"""The changes in torch that put DTensor's surface in place."""

from __future__ import annotations

from dynamo_dist.config import DistConfig
from dynamo_dist.dtensor import (
    _torch,
    attributes,
    construction,
    debug,
    distribution,
    implicit_replication,
    inside_operators,
    loss_parallel,
    unused_outputs,
    views,
)
from dynamo_dist.trackers import creation


def changes(config: DistConfig) -> list[_torch.Change]:
    """Everything to apply, in order; nothing is applied here."""
    return [
        *views.changes(),
        *attributes.changes(),
        *construction.changes(),
        *distribution.changes(),
        *_torch.on_construction(
            {**construction.CONSTRUCTED, **debug.CONSTRUCTED, **creation.CONSTRUCTED}
        ),
        *loss_parallel.changes(),
        *implicit_replication.changes(),
        *inside_operators.changes(),
        *unused_outputs.changes(),
        *_torch.keep_first_symbols(),
        *_torch.keep_strided_shards(),
        *_torch.cut_empty_shards(),
        *_torch.search_decompositions_apart(),
        *_torch.count_strided_shards_with_real_tensors(),
        *_torch.fix_split_factors(),
        *_torch.remember_redistributions(),
    ]
