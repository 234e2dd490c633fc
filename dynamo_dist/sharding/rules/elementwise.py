"""Operators that treat each element on its own, also on Partial tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Shard

from dynamo_dist.sharding.fallback import Decompose
from dynamo_dist.sharding.rows import Call, P, R, Row, Rows, strategy
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs


def broadcast(call: Call) -> list[Row]:
    """Sharded along any dimension of the result; arguments of size 1 there stay whole."""
    ndim = max((len(meta.shape) for meta in call.tensors), default=0)
    rows = []
    for dim in range(-ndim, 0):
        size = max((m.shape[dim] for m in call.tensors if -dim <= len(m.shape)), default=1)
        inputs = [_aligned(meta, dim, size) for meta in call.tensors]
        # Without a sharded argument the row says no more than that all is replicated.
        if any(isinstance(each, Shard) for each in inputs):
            rows.append((*[Shard(ndim + dim)] * call.results, *inputs))
    return rows


def _aligned(meta: Any, dim: int, size: Any) -> Any:
    ndim = len(meta.shape)
    # Counted from the end, as broadcasting aligns dimensions.
    return Shard(ndim + dim) if -dim <= ndim and meta.shape[dim] == size != 1 else R


def leading(trailing: int, *, linear: bool = False) -> Rows:
    """Shard all tensors equally on any dimension but the last ``trailing``; Partial too if linear.

    All tensors have the same number of dimensions and the same sizes in front. The operator is
    linear in the first argument, with the others replicated; only that one may be Partial.
    """

    def rows(call: Call) -> list[Row]:
        ndim = len(call.tensors[0].shape)
        found: list[Row] = [
            tuple([Shard(dim)] * (call.results + len(call.tensors)))
            for dim in range(max(ndim - trailing, 0))
            if all(
                len(m.shape) == ndim and m.shape[dim] == call.tensors[0].shape[dim]
                for m in call.tensors
            )
        ]
        if linear:
            # A linear operator of a sum is the sum of its results.
            found.append((*[P] * call.results, P, *[R] * (len(call.tensors) - 1)))
        return found

    return rows


def beside_the_halves(call: Call) -> list[Row]:
    """Shard all tensors equally on any dimension but ``dim``, where one half gates the other."""
    ndim = call.ndim("self")
    return [
        tuple([Shard(d)] * (call.results + len(call.tensors)))
        for d in range(ndim)
        # Along ``dim`` a shard may hold the gate and not what it gates.
        if d != call.args["dim"] % max(ndim, 1)
    ]


def _each(names: str, rows: Rows, namespace: str = "aten") -> dict[str, Rows]:
    return {f"{namespace}.{name}.default": rows for name in names.split()}


POINTWISE: dict[str, Rows] = {
    **_each(
        "complex polar _prelu_kernel hardswish_backward hardsigmoid_backward hardtanh_backward "
        "softshrink_backward hardshrink_backward log_sigmoid_backward elu_backward mish_backward "
        "softplus_backward leaky_relu_backward threshold_backward silu_backward gelu_backward "
        "_conj_physical rrelu_with_noise_backward",
        broadcast,
    ),
    # What torch's own decompositions are made of.
    **_each(
        "abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or "
        "bitwise_xor cbrt ceil conj_physical convert_element_type cos cosh digamma div eq erf "
        "erf_inv erfc erfcx exp exp2 expm1 floor fma fmax fmin fmod gcd ge gt hypot igamma "
        "igammac isfinite le lgamma log log10 log1p log2 lt maximum minimum mul ndtri ne neg "
        "nextafter pow reciprocal remainder round rsqrt shift_left shift_right_arithmetic sign "
        "signbit sin sinh sqrt sub tan tanh trunc where zeta",
        broadcast,
        "prims",
    ),
}
BESIDE: dict[str, Rows] = _each("glu glu_backward", beside_the_halves)
ELEMENTWISE_ROWS: dict[str, Rows] = {
    **_each(
        "avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward "
        "reflection_pad2d replication_pad2d "
        "reflection_pad2d_backward replication_pad2d_backward im2col",
        leading(2, linear=True),
    ),
    **_each(
        "avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward "
        "reflection_pad3d replication_pad3d "
        "reflection_pad3d_backward replication_pad3d_backward",
        leading(3, linear=True),
    ),
    **_each(
        "reflection_pad1d replication_pad1d reflection_pad1d_backward replication_pad1d_backward",
        leading(1, linear=True),
    ),
    **_each(
        "max_pool2d_with_indices max_pool2d_with_indices_backward adaptive_max_pool2d "
        "adaptive_max_pool2d_backward max_unpool2d",
        leading(2),
    ),
    **_each(
        "max_pool3d_with_indices max_pool3d_with_indices_backward adaptive_max_pool3d "
        "adaptive_max_pool3d_backward max_unpool3d",
        leading(3),
    ),
}


AVERAGE = Partial("avg")


def added(call: Call) -> list[Row]:
    """A summand is added to each part of a sum only if it is pending itself: else all would add
    it.
    """
    # With a number as summand there is one tensor only, and each rank would add the number.
    pending = [(each,) * (1 + len(call.tensors)) for each in (P, AVERAGE) if len(call.tensors) == 2]
    return [*broadcast(call), *pending]


def scaled(call: Call) -> list[Row]:
    """A factor that all ranks have scales each part of a sum."""
    pending = [(each, each, *[R] * (len(call.tensors) - 1)) for each in (P, AVERAGE)]
    return [*broadcast(call), *pending]


def copied(decide: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """As ``decide``, but of one pending result over another of the same kind each rank copies its
    part.

    A graph ends so for every input that it changes, and a copy that gathers could not end one.
    """

    def of_parts(schema: dtensor_specs.OpSchema) -> Any:
        # A source that is a number is filled in by every rank alike, and is not among them.
        given = [each for each in schema.args_schema if isinstance(each, dtensor_specs.OpStrategy)]
        specs: list[Any] = [each.strategies[0].output_spec for each in given]
        target, *sources = specs
        placements = target.placements
        alike = [
            each.mesh == target.mesh
            and each.placements == placements
            and each.shape == target.shape
            # Of a pending sum, the parts' whole numbers are not those of the sum.
            and each.tensor_meta.dtype == target.tensor_meta.dtype
            for each in sources
        ]
        pending = any(isinstance(each, Partial) for each in placements)
        # A mask belongs to one lookup, not to what it is copied over.
        masked = any(dtensor_specs.is_masked(each) for each in placements)
        kind = target.tensor_meta.dtype
        # A cast to whole numbers truncates each part, and the sum of truncated parts is another
        # number.
        if pending and not (kind.is_floating_point or kind.is_complex) and alike == [False]:
            (source,) = sources
            if source.tensor_meta.dtype != kind:
                raise NotImplementedError(
                    "of fractions, the parts' whole numbers are not the sum's"
                )
        # Anything but a copy of like parts is decided as before, with its redistributions.
        if alike != [True] or not pending or masked:
            return decide(schema)
        kept = dtensor_specs.OpSpec(
            output_specs=dtensor_specs.spec(target.mesh, placements),
            input_specs=[target, *sources],
            redistribute_cost=[[0.0], [0.0]],
        )
        return dtensor_specs.OpStrategy([kept])

    return of_parts


def filled(upstream: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """Replace torch's strategy, which writes the number into every rank's part of a Partial sum."""
    decide = strategy(broadcast, any_part=True)

    def by_layout(schema: dtensor_specs.OpSchema) -> Any:
        target: Any = schema.args_schema[0]
        placements = target.strategies[0].output_spec.placements
        # Plain reductions alone: of masks and norms the parts have rules of their own.
        if {type(each) for each in placements if isinstance(each, Partial)} == {Partial}:
            raise Decompose(fill_parts)
        return decide(schema)

    return by_layout


def fill_parts(self: DTensor, value: Any) -> DTensor:
    """Write local parts that reduce to ``value``.

    The old value of a Partial tensor is not needed, so no collective is launched.
    """
    everyones = [R if isinstance(each, Partial) else each for each in self.placements]
    # As large as the local part: a Partial has the full size, and a shard is filled alike
    # everywhere.
    known = torch.full_like(self._local_tensor, value)
    self._local_tensor.copy_(dtensor_specs.relayout(known, self.device_mesh, everyones, self._spec))
    return self


PARTIAL_ROWS: dict[str, Rows] = {
    **{f"aten.fill{name}": broadcast for name in ("_.Tensor", ".Scalar", ".Tensor")},
    **{f"aten.{op}.{kind}": added for op in ("add_", "sub_") for kind in ("Tensor", "Scalar")},
    **{f"aten.{op}.{kind}": scaled for op in ("mul_", "div_") for kind in ("Tensor", "Scalar")},
    **{f"aten.{view}.default": scaled for view in ("_neg_view", "_conj")},
}
WRAPPED: dict[str, Callable[[dtensor_dispatch.Strategy], dtensor_dispatch.Strategy]] = {
    "aten.copy_.default": copied,
    "aten.fill_.Scalar": filled,
}
