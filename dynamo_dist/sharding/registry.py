"""The changes in torch that put our strategies in place."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_dist.config import DistConfig
from dynamo_dist.sharding import (
    _torch,
    as_strided,
    attention,
    collectives,
    convolution,
    draws,
    elementwise,
    embedding,
    failures,
    fallback,
    fitting,
    gathered,
    in_place,
    indexing,
    layout,
    lists,
    masked_gather,
    nll_loss,
    partial,
    random_pooling,
    reduction,
    views,
    writes,
)
from dynamo_dist.sharding.keys._torch import one_decision_for_numbers

FAMILIES: tuple[Mapping[str, layout.Rows], ...] = (
    attention.ROWS,
    convolution.ROWS,
    elementwise.BESIDE,
    elementwise.POINTWISE,
    elementwise.ROWS,
    embedding.ROWS,
    indexing.BESIDE,
    indexing.ROWS,
    nll_loss.ROWS,
    partial.ROWS,
    random_pooling.ROWS,
    reduction.BESIDE,
    reduction.ROWS,
    views.ROWS,
)
OF_ANY_PART = (
    elementwise.BESIDE,
    elementwise.POINTWISE,
    indexing.BESIDE,
    partial.ROWS,
    reduction.BESIDE,
)
WRAPPED = (
    masked_gather.WRAPPED,
    nll_loss.WRAPPED,
    partial.WRAPPED,
    reduction.WRAPPED,
    views.WRAPPED,
)


def changes(config: DistConfig) -> list[_torch.Change]:
    """Everything to apply, in order; nothing is applied here."""
    return [
        # Undone last, so that no decision of ours outlives the strategies.
        _torch.ClearCaches(),
        *(
            change
            for family in FAMILIES
            for name, rows in family.items()
            for op in _torch.overloads(name)
            for change in _torch.on_strategy(
                op,
                failures.of_ours(layout.strategy(rows, family in OF_ANY_PART)),
                _torch.schema_info(op),
            )
        ),
        *(
            change
            for family in WRAPPED
            for name, wrap in family.items()
            for op in _torch.overloads(name)
            if (stock := _torch.stock_strategy(op)) is not None
            for change in _torch.on_strategy(
                op, failures.of_ours(wrap(failures.of_torch(stock))), _torch.schema_info(op)
            )
        ),
        *as_strided.changes(),
        *attention.changes(),
        *collectives.changes(),
        *draws.changes(),
        *in_place.changes(),
        *lists.changes(),
        *random_pooling.changes(),
        *writes.changes(),
        *fitting.changes(),
        *_torch.replicas_in_backward(),
        *_torch.resolved_before_collectives(),
        *_torch.masks_per_trace(),
        *_torch.pending_inputs_stay_pending(),
        *_torch.whole_numbers_in_parts(),
        *_torch.track_symbolic_results(),
        *_torch.only_reachable_strategies(layout.is_reachable),
        *_torch.without_derived_strategies(),
        *_torch.on_failed_propagation(fallback.instead),
        *_torch.on_writes_to_plain_tensors(gathered.run),
        *one_decision_for_numbers(),
        _torch.ClearCaches(),
    ]
