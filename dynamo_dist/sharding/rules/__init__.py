"""The changes in torch that put our strategies in place."""

from __future__ import annotations

from collections.abc import Mapping

from dynamo_dist.settings import DistConfig
from dynamo_dist.sharding import collectives, fallback, writes
from dynamo_dist.sharding import rows as layout
from dynamo_dist.sharding.rules import attention, elementwise, indexing, lists, reduction, views
from dynamo_dist.torch_compat import aot_gradients, dtensor_dispatch, dtensor_strategies
from dynamo_dist.torch_compat.dtensor_dispatch import one_decision_for_numbers
from dynamo_dist.torch_compat.patching import Patch

FAMILIES: tuple[Mapping[str, layout.Rows], ...] = (
    attention.ATTENTION_ROWS,
    attention.CONVOLUTION_ROWS,
    elementwise.BESIDE,
    elementwise.POINTWISE,
    elementwise.ELEMENTWISE_ROWS,
    indexing.EMBEDDING_ROWS,
    indexing.BESIDE,
    indexing.INDEXING_ROWS,
    reduction.NLL_LOSS_ROWS,
    elementwise.PARTIAL_ROWS,
    reduction.BESIDE,
    reduction.REDUCTION_ROWS,
    views.ROWS,
)
OF_ANY_PART = (
    elementwise.BESIDE,
    elementwise.POINTWISE,
    indexing.BESIDE,
    elementwise.PARTIAL_ROWS,
    reduction.BESIDE,
    views.ROWS,
)
WRAPPED = (
    indexing.EMBEDDING_WRAPPED,
    indexing.MASKED_GATHER_WRAPPED,
    reduction.NLL_LOSS_WRAPPED,
    elementwise.WRAPPED,
    reduction.REDUCTION_WRAPPED,
    views.WRAPPED,
)


def patches(config: DistConfig) -> list[Patch]:
    """Everything to apply, in order; nothing is applied here."""
    return [
        # Undone last, so that no decision of ours outlives the strategies.
        dtensor_strategies.ClearCaches(),
        *(
            patch
            for family in FAMILIES
            for name, rows in family.items()
            for op in dtensor_dispatch.overloads(name)
            for patch in dtensor_strategies.on_strategy(
                op,
                fallback.of_ours(layout.strategy(rows, family in OF_ANY_PART)),
                dtensor_strategies.schema_info(op),
            )
        ),
        *(
            patch
            for family in WRAPPED
            for name, wrap in family.items()
            for op in dtensor_dispatch.overloads(name)
            if (upstream := dtensor_strategies.upstream_strategy(op)) is not None
            for patch in dtensor_strategies.on_strategy(
                op,
                fallback.of_ours(wrap(fallback.of_torch(upstream))),
                dtensor_strategies.schema_info(op),
            )
        ),
        *views.patches(),
        *attention.patches(),
        *collectives.patches(),
        *writes.in_place_patches(),
        *lists.patches(),
        *writes.writes_patches(),
        *aot_gradients.replicas_in_backward(),
        *aot_gradients.partial_inputs_stay_partial(),
        *dtensor_strategies.integers_in_partials(),
        *dtensor_strategies.track_symbolic_results(),
        *dtensor_strategies.on_failed_propagation(fallback.instead),
        *aot_gradients.on_writes_to_plain_tensors(fallback.run),
        *one_decision_for_numbers(),
        dtensor_strategies.ClearCaches(),
    ]
