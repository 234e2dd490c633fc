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
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import (
    contexts,
    distribution,
    dtensor,
    dtensor_views,
    higher_order,
    placement,
)


def patches(config: DistConfig) -> list[Patch]:
    """Everything to apply, in order; nothing is applied here."""
    return [
        *dtensor_views.views_patches(),
        *dtensor.attributes_patches(),
        *dtensor.construction_patches(),
        *higher_order.branches_patches(),
        *dtensor.copies_patches(),
        *dtensor.data_sizes_patches(),
        *distribution.patches(),
        *contexts.debug_patches(),
        *placement.reduce_op_patches(),
        *contexts.loss_parallel_patches(),
        *contexts.implicit_replication_patches(),
        *dtensor.inside_operators_patches(),
        *higher_order.regions_patches(),
        *dtensor.subclasses_patches(),
        *dtensor_views.unused_outputs_patches(),
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
