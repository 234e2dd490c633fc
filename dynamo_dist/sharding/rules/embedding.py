"""Rows of a table, and the gradient of the table."""

from __future__ import annotations

from torch.distributed.tensor import Shard

from dynamo_dist.sharding.rows import Call, P, Row, Rows
from dynamo_dist.torch_compat.dtensor import specs


def forward(call: Call) -> list[Row]:
    """Columns; indices; and rows of the table, each rank masking the indices of other ranks' rows."""
    ndim = call.ndim("indices")
    masked = specs.mask_partial(call.args["weight"].shape, 0)
    rows = [call.row([Shard(d)], indices=Shard(d)) for d in range(ndim)]
    return [
        call.row([Shard(ndim)], weight=Shard(1)),
        call.row([masked], weight=Shard(0), indices=masked),
        *rows,
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


ROWS: dict[str, Rows] = {
    "aten.embedding.default": forward,
    "aten.embedding_dense_backward.default": backward,
}
