"""The changes in torch that put DTensor's surface in place."""

from __future__ import annotations

from dynamo_dist.config import DistConfig
from dynamo_dist.torch_compat.aot import equal_meshes, outputs, pending_inputs, random
from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.dtensor import factories, placements
from dynamo_dist.torch_compat.dynamo import view_sizes
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
        *outputs.keep_first_symbols(),
        *equal_meshes.equal_meshes_are_one(),
        *view_sizes.sizes_of_bases_are_inputs(),
        *pending_inputs.write_to_pending_inputs(),
        *pending_inputs.pending_inputs_have_gradients(),
        *placements.keep_strided_shards(),
        *placements.cut_empty_shards(),
        *placements.count_strided_shards_with_real_tensors(),
        *placements.fix_split_factors(),
        *random.save_states_before_objects(),
        *random.draw_once(),
        *factories.random_on_cpu(),
    ]
