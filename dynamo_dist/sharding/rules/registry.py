"""The changes in torch that put our strategies in place."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_dist.config import DistConfig
from dynamo_dist.sharding import (
    collectives,
    failures,
    fallback,
    gathered,
    in_place,
    writes,
)
from dynamo_dist.sharding import rows as layout
from dynamo_dist.sharding.rules import (
    as_strided,
    attention,
    convolution,
    elementwise,
    embedding,
    indexing,
    lists,
    masked_gather,
    nll_loss,
    partial,
    reduction,
    views,
)
from dynamo_dist.torch_compat.aot import backward
from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.dtensor import numbers, operators, strategies
from dynamo_dist.torch_compat.dtensor.keys import one_decision_for_numbers

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
    views.ROWS,
)
WRAPPED = (
    embedding.WRAPPED,
    masked_gather.WRAPPED,
    nll_loss.WRAPPED,
    partial.WRAPPED,
    reduction.WRAPPED,
    views.WRAPPED,
)


def changes(config: DistConfig) -> list[Change]:
    """Everything to apply, in order; nothing is applied here."""
    return [
        # Undone last, so that no decision of ours outlives the strategies.
        strategies.ClearCaches(),
        *(
            change
            for family in FAMILIES
            for name, rows in family.items()
            for op in operators.overloads(name)
            for change in strategies.on_strategy(
                op,
                failures.of_ours(layout.strategy(rows, family in OF_ANY_PART)),
                strategies.schema_info(op),
            )
        ),
        *(
            change
            for family in WRAPPED
            for name, wrap in family.items()
            for op in operators.overloads(name)
            if (stock := strategies.stock_strategy(op)) is not None
            for change in strategies.on_strategy(
                op, failures.of_ours(wrap(failures.of_torch(stock))), strategies.schema_info(op)
            )
        ),
        *as_strided.changes(),
        *attention.changes(),
        *collectives.changes(),
        *in_place.changes(),
        *lists.changes(),
        *writes.changes(),
        *backward.replicas_in_backward(),
        *backward.pending_inputs_stay_pending(),
        *numbers.whole_numbers_in_parts(),
        *numbers.track_symbolic_results(),
        *strategies.on_failed_propagation(fallback.instead),
        *backward.on_writes_to_plain_tensors(gathered.run),
        *one_decision_for_numbers(),
        strategies.ClearCaches(),
    ]
