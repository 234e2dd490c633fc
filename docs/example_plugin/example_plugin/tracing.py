"""A strategy for an operator, and what to trace for a function that Dynamo cannot look into.

The entry point calls ``register`` once, when ``dynamo_dist`` is first enabled.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import Partial, Shard

import dynamo_dist.trackers
from dynamo_dist.sharding import Call, Row, register_rows


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
    # Each element by itself, so the rows hold whichever of them a rank has.
    register_rows(torch.ops.example_plugin.scale.default, each_by_itself, any_part=True)
    dynamo_dist.trackers.trace_instead(mean_over_ranks)(traced_mean)


def each_by_itself(call: Call) -> list[Row]:
    """Keep shards of any dimension where they are, and a Partial sum, whose summands are scaled."""
    return [call.row([at], x=at) for at in (Partial(), *map(Shard, range(call.ndim("x"))))]


def traced_mean(x: torch.Tensor) -> torch.Tensor:
    """The same values as ``mean_over_ranks``, out of what a graph can hold."""
    return funcol.all_reduce(x, "sum", dist.group.WORLD) / dist.get_world_size()
