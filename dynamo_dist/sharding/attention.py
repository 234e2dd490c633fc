"""Attention on the CPU, over batches and over heads."""

from __future__ import annotations

from torch.distributed.tensor import Placement, Shard

from dynamo_dist.sharding.layout import Call, R, Row, Rows


def forward(call: Call) -> list[Row]:
    """Query, key and value are (batch, heads, length, width); grouped heads stay together."""
    return [
        call.row(
            [Shard(d), Shard(d)],
            query=Shard(d),
            key=Shard(d),
            value=Shard(d),
            **_mask(call, d),
        )
        for d in _dims(call)
    ]


def backward(call: Call) -> list[Row]:
    """Gradients of query, key and value from those of the result."""
    names = ("grad_out", "query", "key", "value", "out", "logsumexp")
    return [
        call.row([Shard(d)] * 3, **{name: Shard(d) for name in names}, **_mask(call, d))
        for d in _dims(call)
    ]


def _dims(call: Call) -> list[int]:
    query, key = call.args["query"].shape, call.args["key"].shape
    return [d for d in (0, 1) if query[d] == key[d]]


def _mask(call: Call, dim: int) -> dict[str, Placement]:
    """A mask of size 1 there, or without the dimension, serves all alike."""
    mask = call.args.get("attn_mask")
    if mask is None or len(mask.shape) < 4 or mask.shape[dim] == 1:
        return {"attn_mask": R}
    return {"attn_mask": Shard(dim)}


ROWS: dict[str, Rows] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": forward,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": backward,
}
