"""The changes in torch that put DTensor's surface in place."""

from __future__ import annotations

from dynamo_dist.config import DistConfig
from dynamo_dist.torch_compat import (
    aot_partition,
    aot_runtime,
    aot_tracing,
    dtensor_placements,
    dtensor_ranks,
    dynamo_dtensors,
)
from dynamo_dist.torch_compat.patching import Change
from dynamo_dist.trace.dtensor import (
    attributes,
    branches,
    construction,
    copies,
    data_sizes,
    debug,
    distribution,
    implicit_replication,
    inside_operators,
    loss_parallel,
    regions,
    subclasses,
    unused_outputs,
    views,
)
from dynamo_dist.trace.trackers import reduce_op


def changes(config: DistConfig) -> list[Change]:
    """Everything to apply, in order; nothing is applied here."""
    return [
        *views.changes(),
        *attributes.changes(),
        *construction.changes(),
        *branches.changes(),
        *copies.changes(),
        *data_sizes.changes(),
        *distribution.changes(),
        *debug.changes(),
        *reduce_op.changes(),
        *loss_parallel.changes(),
        *implicit_replication.changes(),
        *inside_operators.changes(),
        *regions.changes(),
        *subclasses.changes(),
        *unused_outputs.changes(),
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
