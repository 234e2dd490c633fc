"""A strategy for an operator, and what to trace in place of a function that Dynamo cannot look into.

The entry point calls ``register`` once, when ``dynamo_dist`` is first enabled.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy

import dynamo_dist.sharding
import dynamo_dist.trackers


@torch.library.custom_op("example_plugin::scale", mutates_args=())
def scale(x: torch.Tensor, by: float) -> torch.Tensor:
    """An operator that DTensor knows nothing of."""
    return x * by


@scale.register_fake
def _(x: torch.Tensor, by: float) -> torch.Tensor:
    return torch.empty_like(x)


@torch.compiler.disable
def mean_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """Communication that Dynamo cannot look into: think of an extension written in C++."""
    y = x.clone()
    dist.all_reduce(y)
    return y / dist.get_world_size()


def register() -> None:
    """What this raises costs a warning, and leaves nothing of the plugin behind."""
    dynamo_dist.sharding.register_strategy(torch.ops.example_plugin.scale.default)(each_by_itself)
    dynamo_dist.trackers.trace_instead(mean_over_ranks)(traced_mean)


def each_by_itself(op_schema: Any) -> OpStrategy:
    """Shards stay where they are; a pending sum is made first, because ``by`` may be negative."""
    now = op_schema.args_schema[0].strategies[0].output_spec
    placements = tuple(Replicate() if p.is_partial() else p for p in now.placements)
    spec = DTensorSpec(now.mesh, placements, tensor_meta=now.tensor_meta)
    return OpStrategy([OpSpec(spec, input_specs=[spec], redistribute_cost=[[0.0]])])


def traced_mean(x: torch.Tensor) -> torch.Tensor:
    """The same values as ``mean_over_ranks``, out of what a graph can hold."""
    return funcol.all_reduce(x, "sum", dist.group.WORLD) / dist.get_world_size()
