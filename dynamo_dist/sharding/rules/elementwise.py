"""Operators that treat each element, or each slice along leading dimensions, on its own."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Shard

from dynamo_dist.sharding.rows import Call, P, R, Row, Rows


def broadcast(call: Call) -> list[Row]:
    """Sharded along any dimension of the result; arguments of size 1 there stay whole."""
    ndim = max((len(meta.shape) for meta in call.tensors), default=0)
    rows = []
    for dim in range(-ndim, 0):
        size = max((m.shape[dim] for m in call.tensors if -dim <= len(m.shape)), default=1)
        inputs = [_aligned(meta, dim, size) for meta in call.tensors]
        if any(isinstance(each, Shard) for each in inputs):
            rows.append((*[Shard(ndim + dim)] * call.results, *inputs))
    return rows


def _aligned(meta: Any, dim: int, size: Any) -> Any:
    ndim = len(meta.shape)
    return Shard(ndim + dim) if -dim <= ndim and meta.shape[dim] == size != 1 else R


def leading(trailing: int, *, linear: bool = False) -> Rows:
    """Sharded alike over all dimensions but the last ``trailing``; sums may be pending if linear.

    All tensors have the same number of dimensions and the same sizes in front. Linear is meant in the
    first argument, the others replicated.
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
            found.append((*[P] * call.results, P, *[R] * (len(call.tensors) - 1)))
        return found

    return rows


def beside_the_halves(call: Call) -> list[Row]:
    """Sharded alike over all dimensions but the one of which one half gates the other."""
    ndim = call.ndim("self")
    return [
        tuple([Shard(d)] * (call.results + len(call.tensors)))
        for d in range(ndim)
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
        "abs acos acosh add asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor "
        "cbrt ceil conj_physical convert_element_type cos cosh digamma div eq erf erf_inv erfc erfcx exp "
        "exp2 expm1 floor fma fmax fmin fmod gcd ge gt hypot igamma igammac isfinite le lgamma log log10 "
        "log1p log2 lt maximum minimum mul ndtri ne neg nextafter pow reciprocal remainder round rsqrt "
        "shift_left shift_right_arithmetic sign signbit sin sinh sqrt sub tan tanh trunc where zeta",
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
