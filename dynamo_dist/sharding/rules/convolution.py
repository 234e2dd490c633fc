"""Convolutions, transposed ones too: sharded over the batch and over channels.

Stock shards them in space by an exchange of borders that is right for few strides and paddings, and
lets other layouts through. Here what is sharded in space is gathered.
"""

from __future__ import annotations

from torch.distributed.tensor import Shard

from dynamo_dist.sharding.rows import Call, P, R, Row, Rows


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
