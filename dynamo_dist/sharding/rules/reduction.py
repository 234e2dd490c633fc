"""Reductions that an empty shard has no result for, and norms that do not add up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Shard

from dynamo_dist.sharding.rows import (
    Call,
    R,
    Row,
    Rows,
    call_of,
    is_whole,
    strategy,
    tensor_strategies,
)
from dynamo_dist.torch_compat.dtensor import calls, types

WrapStrategy = Callable[[calls.Strategy], calls.Strategy]


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
        after = dim if keep else dim - sum(each < dim for each in reduced)
        rows.append(call.row([Shard(after)] * call.results, self=Shard(dim)))
    return rows


def no_empty_shard(decide: calls.Strategy) -> calls.Strategy:
    """As ``decide``, where every rank has something of what is reduced; else sharded beside the reduction alone."""
    safe = strategy(beside_the_reduction, any_part=True)

    def checked(schema: types.OpSchema) -> Any:
        found = decide(schema)
        self: Any = schema.args_schema[0]
        reduced = reduced_dims(call_of(schema, tensor_strategies(schema)))

        def has_something(spec: Any) -> bool:
            over = [p if getattr(p, "dim", None) in reduced else R for p in spec.placements]
            return is_whole(spec.mesh, over, self.shape)

        whole = [
            each
            for each in found.strategies
            if all(map(has_something, each.input_specs or [each.output_spec]))
        ]
        return types.OpStrategy(whole) if whole else safe(schema)

    return checked


def is_extreme(order: object) -> bool:
    """Return whether nothing is the norm of this order of no elements."""
    return isinstance(order, (int, float)) and (order < 0 or order == float("inf"))


def extreme_norms(decide: calls.Strategy) -> calls.Strategy:
    """Norms of order inf and of negative orders: an empty shard has none."""
    checked = no_empty_shard(decide)

    def by_order(schema: types.OpSchema) -> Any:
        order = schema.args_schema[1] if len(schema.args_schema) > 1 else 2
        return (checked if is_extreme(order) else decide)(schema)

    return by_order


def all_dims_for_none(decide: calls.Strategy) -> calls.Strategy:
    """An empty list of dimensions means all of them, as on one device."""

    def spelled_out(schema: types.OpSchema) -> Any:
        if len(schema.args_schema) > 1 and schema.args_schema[1] in ([], ()):
            self: Any = schema.args_schema[0]
            rest = schema.args_schema[2:]
            schema = types.OpSchema(
                schema.op,
                (self, list(range(self.ndim)), *rest),
                schema.kwargs_schema,
                schema_info=schema.schema_info,
            )
        return decide(schema)

    return spelled_out


def beside_the_transform(call: Call) -> list[Row]:
    """Fourier transforms, over dimensions that are not transformed; none of an empty shard exists."""
    ndim = call.ndim("self")
    transformed = {dim % ndim for dim in call.args["dim"]}
    return [call.row([Shard(d)], self=Shard(d)) for d in range(ndim) if d not in transformed]


def on_whole_tensors(call: Call) -> list[Row]:
    """Replicated alone: what torch shards here does not compute the same."""
    return []


# Each result is of elements that one rank has: how many results it has makes no difference.
BESIDE: dict[str, Rows] = {
    # The product of bools that torch leaves pending is an integer.
    **{f"aten.all.{kind}": beside_the_reduction for kind in ("default", "dim", "dims")},
    "aten.aminmax.default": beside_the_reduction,
    "aten.argmax.default": beside_the_reduction,
    "aten.argmin.default": beside_the_reduction,
    "aten.logsumexp.default": beside_the_reduction,
}
ROWS: dict[str, Rows] = {
    **{f"aten._fft_{kind}.default": beside_the_transform for kind in ("r2c", "c2c", "c2r")},
    "aten.hash_tensor.default": on_whole_tensors,
    "aten.linalg_ldl_solve.default": on_whole_tensors,
    "aten.multilabel_margin_loss_forward.default": on_whole_tensors,
    "aten.multilabel_margin_loss_backward.default": on_whole_tensors,
}
WRAPPED: dict[str, WrapStrategy] = {
    **dict.fromkeys(
        (
            "aten.max.default",
            "aten.min.default",
            "aten.amax.default",
            "aten.amin.default",
        ),
        lambda decide: no_empty_shard(all_dims_for_none(decide)),
    ),
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
