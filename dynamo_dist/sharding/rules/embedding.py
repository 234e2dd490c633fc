"""Rows of a table, and the gradient of the table.

Of a table whose rows are sharded each rank looks up its own, and puts zeros where an index falls elsewhere: the result is
pending as a sum. Torch does so with a placement that keeps the mask until the sum, of which two that are pending at once
refuse each other, and which is reduced once; here the mask is of one call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dynamo_dist.sharding.fallback import Decompose
from dynamo_dist.sharding.rows import Call, P, Row, Rows, strategy
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs

EMBEDDING = "aten.embedding.default"


def forward(call: Call) -> list[Row]:
    """Columns, and indices; for sharded rows see ``of_own_rows``."""
    ndim = call.ndim("indices")
    return [
        call.row([Shard(ndim)], weight=Shard(1)),
        *(call.row([Shard(d)], indices=Shard(d)) for d in range(ndim)),
    ]


def backward(call: Call) -> list[Row]:
    """Columns; and sums over indices, unless each rank would count how often its own indices occur."""
    ndim = call.ndim("grad_output")
    rows = [
        call.row([Shard(1)], grad_output=Shard(ndim - 1)),
        call.row([P], grad_output=P),
    ]
    if not call.args["scale_grad_by_freq"]:
        rows += [
            call.row([P], grad_output=Shard(d), indices=Shard(d))
            for d in range(call.ndim("indices"))
        ]
    return rows


def of_own_rows(stock: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """In the place of torch's: ``forward``, unless rows are sharded and each rank looks up its own."""
    decide = strategy(forward)

    def by_layout(schema: dtensor_specs.OpSchema) -> Any:
        tables: Any = schema.args_schema[:2]
        weight, indices = (each.strategies[0].output_spec.placements for each in tables)
        if (layout := layout_of_own_rows(weight, indices)) is not None:
            raise Decompose(functools.partial(look_up, *layout))
        return decide(schema)

    return by_layout


def layout_of_own_rows(
    weight: tuple[Placement, ...], indices: tuple[Placement, ...]
) -> tuple[list[Placement], list[bool]] | None:
    """Placements that the indices need, and which mesh dimensions shard rows; None where rows are whole or cut otherwise."""
    needed: list[Placement] = []
    for table, index in zip(weight, indices, strict=True):
        if type(table) is not Shard and not table.is_replicate():
            return None
        if type(index) is not Shard and not index.is_replicate():
            return None
        needed.append(index if table.is_replicate() else Replicate())
    by_rows = [table == Shard(0) for table in weight]
    return (needed, by_rows) if any(by_rows) else None


def look_up(
    needed: list[Placement],
    by_rows: list[bool],
    weight: DTensor,
    indices: DTensor,
    *others: object,
    **named: object,
) -> DTensor:
    """Look up in this rank's rows; what else an embedding is told is of its gradient."""
    mesh, dims = weight.device_mesh, [at for at, sharded in enumerate(by_rows) if sharded]
    own: torch.Tensor = indices.redistribute(placements=needed)._local_tensor
    rows, masks = weight.shape[0], []
    for at in dims:
        own, outside = dtensor_specs.own_part_of_index(own, mesh, at, (rows,), 0)
        masks.append(outside)
        if at != dims[-1]:
            rows = dtensor_specs.own_length(rows, mesh, at)
    local = weight._local_tensor
    if local.shape[0] == 0:
        found = local.new_zeros((*own.shape, local.shape[1]))
    else:
        elsewhere = functools.reduce(torch.logical_or, masks)
        found = torch.ops.aten.embedding.default(local, own)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
    placements = [
        P if is_by_rows else Shard(indices.ndim) if table.is_shard() else index
        for is_by_rows, table, index in zip(by_rows, weight.placements, needed, strict=True)
    ]
    shape = (*indices.shape, weight.shape[1])
    meta = dtensor_specs.TensorMeta(
        torch.Size(shape), torch.empty(shape, device="meta").stride(), weight.dtype
    )
    result: DTensor = dtensor_specs.wrap(found, mesh, placements, meta)
    return result


EMBEDDING_ROWS: dict[str, Rows] = {"aten.embedding_dense_backward.default": backward}
EMBEDDING_WRAPPED = {EMBEDDING: of_own_rows}
