"""Attention on the CPU, and convolutions.

Inside ``context_parallel`` each rank holds a part of the sequence, in an order that balances a
causal mask over the ranks. Torch's rings for it are kernels of CUDA: on the CPU only what does not
depend on the order of the sequence is computed.

Upstream shards them in space by an exchange of borders that is right for few strides and paddings,
and lets other layouts through. Here what is sharded in space is gathered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor, Placement, Shard

from dynamo_dist.errors import StrategyError
from dynamo_dist.sharding.rows import Call, P, R, Row, Rows
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs
from dynamo_dist.torch_compat.patching import Patch


def convolution_forward(call: Call) -> list[Row]:
    """Batch; output channels; input channels, whose products are summed; sums that are pending."""
    out_channels, in_channels = (1, 0) if call.args["transposed"] else (0, 1)
    rows = [
        call.row([Shard(0)], input=Shard(0)),
        # Linear in the bias too, which must be added once: it is pending where the products are.
        call.row([P], input=P, bias=P),
        call.row([P], weight=P, bias=P),
    ]
    if call.args["groups"] == 1:
        rows += [
            call.row([Shard(1)], weight=Shard(out_channels), bias=Shard(0)),
            call.row([P], input=Shard(1), weight=Shard(in_channels), bias=P),
        ]
    return rows


def convolution_backward(call: Call) -> list[Row]:
    """The same, for the gradients of input, weight and bias."""
    mask = call.args["output_mask"]
    out_channels, in_channels = (1, 0) if call.args["transposed"] else (0, 1)

    def row(*results: object, **arguments: object) -> Row:
        kept = [each if wanted else None for each, wanted in zip(results, mask, strict=True)]
        return call.row(kept, **arguments)  # type: ignore[arg-type]

    rows = [row(Shard(0), P, P, grad_output=Shard(0), input=Shard(0)), row(P, P, P, grad_output=P)]
    if call.args["groups"] == 1:
        over_out, over_in = Shard(out_channels), Shard(in_channels)
        rows += [
            row(P, over_out, Shard(0), grad_output=Shard(1), weight=over_out),
            row(Shard(1), over_in, R, input=Shard(1), weight=over_in),
        ]
    return rows


CONVOLUTION_ROWS: dict[str, Rows] = {
    "aten.convolution.default": convolution_forward,
    "aten.convolution_backward.default": convolution_backward,
}


QUERY_LENGTH = 2
KERNEL = "aten._scaled_dot_product_flash_attention_for_cpu.default"


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
    """A mask, (length, keys) or with batch and heads; of size 1 there, or without that, it
    serves all.
    """
    mask = call.args.get("attn_mask")
    if mask is None:
        return {"attn_mask": R}
    at = len(mask.shape) - 4 + dim
    return {"attn_mask": R if at < 0 or mask.shape[at] == 1 else Shard(at)}


ATTENTION_ROWS: dict[str, Rows] = {
    KERNEL: forward,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": backward,
}


def in_context_parallel(
    op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Every rank's part of the queries against all keys; raises StrategyError for causal and
    other masks.
    """
    names = [argument.name for argument in op._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if given.get("is_causal") or given.get("attn_mask") is not None:
        raise StrategyError(
            f"context_parallel cannot compute attention with a mask on the CPU, by {op} in "
            f"{given['query'].placements}.",
            "Its parts of the sequence are not in the order of the sequence, which the mask is "
            "for, and torch passes keys around in a ring on CUDA alone.",
            "Use CUDA, or keep the sequence whole on every rank: shard batch or heads.",
        )
    results = dtensor_dispatch.as_upstream(op, in_context_parallel, args, kwargs)
    return tuple(_by_query(each) for each in results)


def _by_query(tensor: DTensor) -> DTensor:
    return tensor.redistribute(placements=[Shard(QUERY_LENGTH)] * tensor.device_mesh.ndim)


def output_by_query(upstream: Callable[..., object]) -> Callable[..., object]:
    """Results are taken apart as the queries were: torch takes local tensors in any placements
    for that.
    """

    @functools.wraps(upstream)
    def output(self: Any, module: Any, inputs: Any, outputs: Any, mesh: Any) -> Any:
        def by_sequence(value: DTensor) -> DTensor:
            return value.redistribute(placements=[Shard(self.seq_dim)] * value.device_mesh.ndim)

        return upstream(
            self,
            module,
            inputs,
            dtensor_dispatch.tree_map_only(DTensor, by_sequence, outputs),
            mesh,
        )

    return output


def patches() -> list[Patch]:
    """List the patches that enabling makes for ``context_parallel``."""
    return dtensor_specs.in_context_parallel(
        dict.fromkeys(dtensor_dispatch.overloads(KERNEL), in_context_parallel), output_by_query
    )
