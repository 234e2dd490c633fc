"""The changes in torch that put DTensor's surface in place."""

from __future__ import annotations

from dynamo_dist.settings import DistConfig
from dynamo_dist.torch_compat import (
    aot_partition,
    aot_runtime,
    aot_tracing,
    dtensor_placements,
    dtensor_ranks,
    dynamo_dtensors,
)
from dynamo_dist.torch_compat.patching import Change
from dynamo_dist.tracing import (
    contexts,
    distribution,
    dtensor,
    dtensor_views,
    higher_order,
    placement,
)


def changes(config: DistConfig) -> list[Change]:
    """Everything to apply, in order; nothing is applied here."""
    return [
        *dtensor_views.views_changes(),
        *dtensor.attributes_changes(),
        *dtensor.construction_changes(),
        *higher_order.branches_changes(),
        *dtensor.copies_changes(),
        *dtensor.data_sizes_changes(),
        *distribution.changes(),
        *contexts.debug_changes(),
        *placement.reduce_op_changes(),
        *contexts.loss_parallel_changes(),
        *contexts.implicit_replication_changes(),
        *dtensor.inside_operators_changes(),
        *higher_order.regions_changes(),
        *dtensor.subclasses_changes(),
        *dtensor_views.unused_outputs_changes(),
        *aot_runtime.keep_first_symbols(),
        *aot_tracing.equal_meshes_are_one(),
        *dynamo_dtensors.sizes_of_bases_are_inputs(),
        *aot_runtime.write_to_pending_inputs(),
        *aot_runtime.pending_inputs_have_gradients(),
        *dtensor_placements.keep_strided_shards(),
        *dtensor_placements.cut_empty_shards(),
        *dtensor_placements.count_strided_shards_with_real_tensors(),
        *dtensor_placements.fix_split_factors(),
        *aot_partition.save_states_before_objects(),
        *aot_partition.draw_once(),
        *dtensor_ranks.random_on_cpu(),
    ]
