"""The loss of class labels, whose mean divides by the weight of the labels that count.

Ranks that hold as many labels as others may have fewer that count: those to ignore are left out, and
classes have weights. A mean of the ranks' means is then another number, so that a mean over shards is the
sum over all of them by the weight of all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard

from dynamo_dist.sharding.fallback import Decompose
from dynamo_dist.sharding.rows import Call, P, R, Row, Rows, strategy
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs

NONE, MEAN, SUM = range(3)  # torch's numbers of reductions


def forward(call: Call) -> list[Row]:
    """Loss and weight of all labels; a loss is linear in the logarithms of the probabilities."""
    rows = [call.row([P, R], self=P)]
    if call.args["reduction"] == MEAN:
        return rows
    for self, target in _sharded(call):
        loss, weight = (target, R) if call.args["reduction"] == NONE else (P, P)
        rows.append(call.row([loss, weight], self=self, target=target))
    return rows


def backward(call: Call) -> list[Row]:
    """The gradient of the probabilities, from the weight of all labels if it is of a mean."""
    each = call.args["reduction"] == NONE
    # Else nobody reads it, and it may stay pending.
    weights = [R] if call.args["reduction"] == MEAN else [R, P]
    rows = [call.row([P], grad_output=P, total_weight=weight) for weight in weights]
    for self, target in _sharded(call):
        grad = target if each else R
        rows += [
            call.row([self], grad_output=grad, self=self, target=target, total_weight=weight)
            for weight in weights
        ]
    return rows


def _sharded(call: Call) -> list[tuple[Shard, Shard]]:
    """Placements of probabilities and labels that go together: over all dimensions but the classes'."""
    ndim = call.ndim("self")
    return [(Shard(d), Shard(d - (d > 1))) for d in range(ndim) if ndim > 1 and d != 1]


def of_sums(stock: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """In the place of torch's: ``forward``, but a mean over shards is computed from two sums."""
    decide = strategy(forward)

    def by_reduction(schema: dtensor_specs.OpSchema) -> Any:
        self, target, _, reduction = schema.args_schema[:4]
        if reduction == MEAN and (_is_split(self, classes=1) or _is_split(target)):
            raise Decompose(mean(schema.op))
        return decide(schema)

    return by_reduction


def _is_split(strategy: Any, classes: int | None = None) -> bool:
    """Return whether ranks have other elements along a dimension that is not the classes'."""
    spec = strategy.strategies[0].output_spec
    dims = {getattr(placement, "dim", None) for placement in spec.placements}
    return len(spec.shape) > 0 and bool(dims - {None, classes if len(spec.shape) > 1 else 0})


def mean(op: dtensor_specs.OpOverload) -> Callable[..., Any]:
    """Return a function for a mean by ``op`` from sums: the loss, and the weight of all labels on every rank."""

    def run(self: Any, target: Any, weight: Any, reduction: int, ignore_index: Any) -> Any:
        loss, total = op(self, target, weight, SUM, ignore_index)
        total = total.redistribute(placements=[Replicate()] * total.device_mesh.ndim)
        if self.dtype == torch.float16:  # its range might not hold the sum
            losses, _ = op(self, target, weight, NONE, ignore_index)
            return (losses / total).sum(), total
        return loss / total, total

    return run


NLL_LOSS_ROWS: dict[str, Rows] = {
    "aten.nll_loss_backward.default": backward,
    "aten.nll_loss2d_backward.default": backward,
}
NLL_LOSS_WRAPPED: dict[str, Callable[[dtensor_dispatch.Strategy], dtensor_dispatch.Strategy]] = {
    "aten.nll_loss_forward.default": of_sums,
    "aten.nll_loss2d_forward.default": of_sums,
}
