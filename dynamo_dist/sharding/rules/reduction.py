"""Reductions that an empty shard has no result for, norms that do not add up, and the mean loss of
labels.

Ranks that hold as many labels as others may have fewer that count: those to ignore are left out,
and classes have weights. A mean of the ranks' means is then another number, so that a mean over
shards is the sum over all of them by the weight of all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from dynamo_dist.sharding.fallback import Decompose
from dynamo_dist.sharding.rows import (
    Call,
    P,
    R,
    Row,
    Rows,
    call_of,
    is_whole,
    strategy,
    tensor_strategies,
)
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

NONE, MEAN, SUM = range(3)  # torch's numbers of reductions


def forward(call: Call) -> list[Row]:
    """Loss and weight of all labels; a loss is linear in the logarithms of the probabilities."""
    rows = [call.row([P, R], self=P)]
    if call.args["reduction"] == MEAN:
        return rows
    for self, target in _sharded(call):
        # A sum over shards is pending, and so is the weight of the labels that it counts.
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
        # The gradient of a sum is one number, which every rank needs.
        grad = target if each else R
        rows += [
            call.row([self], grad_output=grad, self=self, target=target, total_weight=weight)
            for weight in weights
        ]
    return rows


def _sharded(call: Call) -> list[tuple[Shard, Shard]]:
    """Placements of probabilities and labels that go together: over all dimensions but the
    classes'.
    """
    ndim = call.ndim("self")
    # Labels lack the dimension of the classes, which is 1: later dimensions move up by one.
    return [(Shard(d), Shard(d - (d > 1))) for d in range(ndim) if ndim > 1 and d != 1]


def of_sums(upstream: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """Replace torch's strategy by ``forward``, and compute a mean over shards from two sums."""
    decide = strategy(forward)

    def by_reduction(schema: dtensor_specs.OpSchema) -> object:
        self, target, _, reduction = schema.args_schema[:4]
        # Only there ranks may count different weights; a replicated mean is the same everywhere.
        if reduction == MEAN and (_is_split(self, classes=1) or _is_split(target)):
            raise Decompose(mean(schema.op))
        return decide(schema)

    return by_reduction


def _is_split(strategy: Any, classes: int | None = None) -> bool:
    """Return whether ranks have other elements along a dimension that is not the classes'."""
    spec = strategy.strategies[0].output_spec
    dims = {dtensor_specs.sharded_dim(placement) for placement in spec.placements}
    return len(spec.shape) > 0 and bool(dims - {None, classes if len(spec.shape) > 1 else 0})


def mean(op: dtensor_specs.OpOverload) -> Callable[..., Any]:
    """Return a function for a mean by ``op`` from sums: the loss, and the weight of all labels
    on every rank.
    """

    def run(
        self: Any, target: object, weight: object, reduction: int, ignore_index: object
    ) -> object:
        loss, total = op(self, target, weight, SUM, ignore_index)
        # One all-reduce of a number; the backward needs the whole weight too.
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


WrapStrategy = Callable[[dtensor_dispatch.Strategy], dtensor_dispatch.Strategy]
# Of a call: a number that changes no result of it.
Neutral = Callable[[dtensor_specs.OpSchema], float]


def reduced_dims(call: Call) -> set[int]:
    """The dimensions of ``self`` that go, none of them negative."""
    ndim = call.ndim("self")
    dims = call.args.get("dim")
    if dims is None or dims == []:
        return set(range(ndim))
    return {dim % max(ndim, 1) for dim in (dims if isinstance(dims, (list, tuple)) else [dims])}


def beside_the_reduction(call: Call) -> list[Row]:
    """Sharded over dimensions that stay."""
    reduced, keep = reduced_dims(call), call.args.get("keepdim", False)
    rows = []
    for dim in set(range(call.ndim("self"))) - reduced:
        # Reduced dimensions in front are gone from the result.
        after = dim if keep else dim - sum(each < dim for each in reduced)
        rows.append(call.row([Shard(after)] * call.results, self=Shard(dim)))
    return rows


def no_empty_shard(
    decide: dtensor_dispatch.Strategy, neutral: Neutral
) -> dtensor_dispatch.Strategy:
    """As ``decide``, where every rank has something of what is reduced; else of shards that
    ``neutral`` is added to.
    """
    safe = strategy(beside_the_reduction, any_part=True)

    def checked(schema: dtensor_specs.OpSchema) -> Any:
        found = decide(schema)
        self: Any = schema.args_schema[0]
        reduced = reduced_dims(call_of(schema, tensor_strategies(schema)))

        def is_over(placement: Placement) -> bool:
            return dtensor_specs.sharded_dim(placement) in reduced

        def has_something(spec: Any) -> bool:
            # An empty shard along a dimension that stays only makes an empty result, which is
            # right.
            over = [p if is_over(p) else R for p in spec.placements]
            return is_whole(spec.mesh, over, self.shape)

        whole = [
            each
            for each in found.strategies
            if all(map(has_something, each.input_specs or [each.output_spec]))
        ]
        if whole:
            return dtensor_specs.OpStrategy(whole)
        now: Any = self.strategies[0].output_spec
        dims = {p.dim for p in now.placements if is_over(p)}
        plain = all(type(p) is Shard for p in now.placements if is_over(p))
        # Of nothing on all ranks there is no result either, as one device says.
        if len(self.strategies) > 1 or not plain or not all(self.shape[dim] for dim in dims):
            return safe(schema)
        raise Decompose(functools.partial(with_one_more, schema.op, dims, neutral(schema)))

    return checked


def with_one_more(
    op: dtensor_specs.OpOverload,
    dims: set[int],
    value: float,
    self: DTensor,
    *args: object,
    **kwargs: object,
) -> object:
    """Reduce ``dims`` after each rank has padded them by one element that changes no result."""
    # constant_pad_nd counts from the last dimension, with a pair of (before, after) each.
    added = [int(dim in dims and at) for dim in reversed(range(self.ndim)) for at in (0, 1)]
    local = torch.constant_pad_nd(self._local_tensor, added, value)
    # The result has none of these dimensions: any length that all ranks share out evenly will do.
    mesh = self.device_mesh
    shape = torch.Size(mesh.size() if d in dims else n for d, n in enumerate(self.shape))
    meta = dtensor_specs.TensorMeta(shape, self.stride(), self.dtype)
    return op(dtensor_specs.wrap(local, mesh, self.placements, meta), *args, **kwargs)


def least(schema: dtensor_specs.OpSchema) -> float:
    """Return a number of the input's dtype that none is smaller than."""
    return _bounds(schema)[0]


def largest(schema: dtensor_specs.OpSchema) -> float:
    """Return a number of the input's dtype that none is larger than."""
    return _bounds(schema)[1]


def _bounds(schema: dtensor_specs.OpSchema) -> tuple[float, float]:
    self: Any = schema.args_schema[0]
    dtype = self.strategies[0].output_spec.tensor_meta.dtype
    if dtype.is_floating_point:
        return -float("inf"), float("inf")
    return (0, 1) if dtype is torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def extremes(neutral: Neutral) -> WrapStrategy:
    """Return a wrapper that adapts a strategy to extremes, which an empty shard does not have."""
    # The empty list is spelled out first: which dimensions are reduced decides what may be empty.
    return lambda decide: no_empty_shard(all_dims_for_none(decide), neutral)


def is_extreme(order: object) -> bool:
    """Return whether nothing is the norm of this order of no elements."""
    return isinstance(order, (int, float)) and (order < 0 or order == float("inf"))


def extreme_norms(decide: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """Norms of order inf and of negative orders: an empty shard has none."""

    def order_of(schema: dtensor_specs.OpSchema) -> Any:
        return schema.args_schema[1] if len(schema.args_schema) > 1 else 2

    # A negative order finds the smallest element, an infinite one the largest of absolute values.
    checked = no_empty_shard(decide, lambda schema: float("inf") if order_of(schema) < 0 else 0)
    return lambda schema: (checked if is_extreme(order_of(schema)) else decide)(schema)


def all_dims_for_none(decide: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """An empty list of dimensions means all of them, as on one device."""

    def spelled_out(schema: dtensor_specs.OpSchema) -> object:
        # Torch's strategies take an empty list for no dimension and would reduce nothing.
        if len(schema.args_schema) > 1 and schema.args_schema[1] in ([], ()):
            self: Any = schema.args_schema[0]
            rest = schema.args_schema[2:]
            schema = dtensor_specs.OpSchema(
                schema.op,
                (self, list(range(self.ndim)), *rest),
                schema.kwargs_schema,
                schema_info=schema.schema_info,
            )
        return decide(schema)

    return spelled_out


def beside_the_transform(call: Call) -> list[Row]:
    """Fourier transforms, over dimensions that are not transformed; none of an empty shard
    exists.
    """
    ndim = call.ndim("self")
    transformed = {dim % ndim for dim in call.args["dim"]}
    # Every element of a transformed dimension contributes to every result along it.
    return [call.row([Shard(d)], self=Shard(d)) for d in range(ndim) if d not in transformed]


def on_whole_tensors(call: Call) -> list[Row]:
    """Replicated alone: what torch shards here does not compute the same."""
    return []


# Each result is of elements that one rank has: how many results it has makes no difference.
BESIDE: dict[str, Rows] = {
    "aten.aminmax.default": beside_the_reduction,
    "aten.argmax.default": beside_the_reduction,
    "aten.argmin.default": beside_the_reduction,
    "aten.logsumexp.default": beside_the_reduction,
}
REDUCTION_ROWS: dict[str, Rows] = {
    **{f"aten._fft_{kind}.default": beside_the_transform for kind in ("r2c", "c2c", "c2r")},
    "aten.hash_tensor.default": on_whole_tensors,
    "aten.linalg_ldl_solve.default": on_whole_tensors,
    "aten.multilabel_margin_loss_forward.default": on_whole_tensors,
    "aten.multilabel_margin_loss_backward.default": on_whole_tensors,
}
REDUCTION_WRAPPED: dict[str, WrapStrategy] = {
    **dict.fromkeys(("aten.max.default", "aten.amax.default"), extremes(least)),
    **dict.fromkeys(("aten.min.default", "aten.amin.default"), extremes(largest)),
    **dict.fromkeys(
        (
            "aten.sum.dim_IntList",
            "aten.mean.dim",
            "aten.nansum.default",
            "aten.any.dims",
            "aten.all.dims",
            "aten.std.correction",
            "aten.var.correction",
            "aten.var_mean.correction",
            "aten.std_mean.correction",
        ),
        all_dims_for_none,
    ),
    "aten.linalg_vector_norm.default": extreme_norms,
    "aten.norm.Scalar": extreme_norms,
}
