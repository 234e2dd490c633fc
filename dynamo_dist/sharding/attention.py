"""Attention on the CPU, over batches, over heads and over the length of the query."""

from __future__ import annotations

from torch.distributed.tensor import Placement, Shard

from dynamo_dist.sharding.layout import Call, P, R, Row, Rows

QUERY_LENGTH = 2


def forward(call: Call) -> list[Row]:
    """Query, key and value are (batch, heads, length, width); grouped heads stay together."""
    return [
        call.row(
            [Shard(d), Shard(d)],
            query=Shard(d),
            **dict.fromkeys(("key", "value"), _of_keys(d)),
            **_mask(call, d),
        )
        for d in _dims(call)
    ]


def backward(call: Call) -> list[Row]:
    """Gradients of query, key and value from those of the result.

    Each part of the query's length contributes a summand to the gradients of keys and values.
    """
    rows = []
    for d in _dims(call):
        sharded = dict.fromkeys(("grad_out", "query", "out", "logsumexp"), Shard(d))
        keys = dict.fromkeys(("key", "value"), _of_keys(d))
        to_keys = P if d == QUERY_LENGTH else Shard(d)
        rows.append(call.row([Shard(d), to_keys, to_keys], **sharded, **keys, **_mask(call, d)))
    return rows


def _dims(call: Call) -> list[int]:
    query, key = call.args["query"].shape, call.args["key"].shape
    alike = [d for d in (0, 1) if query[d] == key[d]]
    # Under a causal mask a query's place in the whole length says which keys it sees.
    return alike if call.args["is_causal"] else [*alike, QUERY_LENGTH]


def _of_keys(dim: int) -> Placement:
    return R if dim == QUERY_LENGTH else Shard(dim)


def _mask(call: Call, dim: int) -> dict[str, Placement]:
    """A mask, (length, keys) or with batch and heads; of size 1 there, or without that, it serves all."""
    mask = call.args.get("attn_mask")
    if mask is None:
        return {"attn_mask": R}
    at = len(mask.shape) - 4 + dim
    return {"attn_mask": R if at < 0 or mask.shape[at] == 1 else Shard(at)}


ROWS: dict[str, Rows] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": forward,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": backward,
}
