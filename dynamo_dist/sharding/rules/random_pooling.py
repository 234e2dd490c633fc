"""Fractional pooling, whose random samples torch draws on each rank for itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from dynamo_dist.sharding.rows import Call, Row, Rows
from dynamo_dist.sharding.rules.elementwise import leading
from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.dtensor import operators, specs, strategies, types

POOLS = ("aten.fractional_max_pool2d.default", "aten.fractional_max_pool3d.default")


def samples_of_all(tensor: DTensor, samples: Any) -> DTensor:
    """The samples of the mesh's first rank, on all of them: a small all-gather."""
    mesh = tensor.device_mesh
    own = samples[None].contiguous()
    shape = torch.Size((mesh.size(), *samples.shape))
    meta = types.TensorMeta(shape, own.stride(), own.dtype)
    stacked = specs.wrap(own, mesh, [Shard(0)] * mesh.ndim, meta)
    everywhere = [Replicate()] * mesh.ndim
    first = stacked.redistribute(placements=everywhere)._local_tensor[0]
    meta = types.TensorMeta(first.shape, first.stride(), first.dtype)
    return specs.wrap(first, mesh, everywhere, meta)


def handler(op: types.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """With plain samples, (batch, channels, dimensions), those of the first rank serve all."""
    tensor, kernel, size, samples = args
    if not isinstance(samples, DTensor):
        samples = samples_of_all(tensor, samples)
    return operators.as_stock(op, handler, (tensor, kernel, size, samples), kwargs)


def over_batch_and_channels(call: Call) -> list[Row]:
    """Input and samples are sharded alike; an unbatched input has one dimension less, and is not."""
    image, samples = call.args["self"].shape, call.args["random_samples"].shape
    return [
        call.row([Shard(d), Shard(d)], self=Shard(d), random_samples=Shard(d))
        for d in (0, 1)
        if image[:2] == samples[:2]
    ]


ROWS: dict[str, Rows] = {
    **dict.fromkeys(POOLS, over_batch_and_channels),
    "aten.fractional_max_pool2d_backward.default": leading(2),
    "aten.fractional_max_pool3d_backward.default": leading(3),
}


def changes() -> list[Change]:
    """List the changes that enabling makes for fractional pooling."""
    return [
        change
        for name in POOLS
        for op in operators.overloads(name)
        for change in strategies.on_dispatch(op, handler)
    ]
