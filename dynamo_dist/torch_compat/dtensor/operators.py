"""Operators as DTensor's dispatcher sees them: shapes, decompositions, writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.distributed._local_tensor import maybe_disable_local_tensor_mode
from torch.distributed.tensor._op_schema import OpSchema, OpStrategy, TupleStrategy
from torch.nn.utils import clip_grad

from dynamo_dist.torch_compat.changes import Change, WrapAttribute
from dynamo_dist.torch_compat.dtensor.calls import Handler, dispatcher, propagator, tree_leaves


def adjusts_shapes(op: OpOverload) -> bool:
    """Return whether torch rewrites arguments of ``op`` that are global shapes, so that local ones differ."""
    return op in propagator().op_to_shape_and_stride_idx


def shapes_of_results(
    schema: OpSchema, shapes: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]] | None:
    """Shapes that the operator gives for tensor arguments of these shapes; None if that cannot be told."""
    left = iter(shapes)

    def fake(value: Any) -> Any:
        if isinstance(value, OpStrategy):
            meta = value.strategies[0].output_spec.tensor_meta
            assert meta is not None
            return torch.empty(next(left), dtype=meta.dtype)
        if isinstance(value, TupleStrategy):
            return [fake(child) for child in value.children]
        return [fake(child) for child in value] if isinstance(value, (list, tuple)) else value

    with maybe_disable_local_tensor_mode(), detect_fake_mode() or FakeTensorMode():
        args = [fake(value) for value in schema.args_schema]
        kwargs = {name: fake(value) for name, value in schema.kwargs_schema.items()}
        try:
            results = schema.op(*args, **kwargs)
        except Exception:
            return None
    return [tuple(r.shape) for r in tree_leaves(results) if isinstance(r, torch.Tensor)]


def as_stock(
    op: OpOverload, handler: Handler, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The call as it would be answered if ``handler``, which makes it, or one around it were not there."""
    handlers = dispatcher()._custom_op_handlers
    found = handlers.pop(op, handler)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = found


def on_clipping(clip: Callable[..., None]) -> list[Change]:
    """Have ``clip(stock, parameters, max_norm, total_norm, foreach)`` scale gradients to a norm.

    Torch's function for it has this name in 2.13 to 2.15.
    """

    def clipping(stock: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(stock)
        def scale(
            parameters: Any, max_norm: float, total_norm: Any, foreach: bool | None = None
        ) -> None:
            clip(stock, parameters, max_norm, total_norm, foreach)

        return scale

    return [WrapAttribute(clip_grad, "_clip_grads_with_norm_", clipping, traced=True)]


def decomposition(op: OpOverload) -> Callable[..., Any] | None:
    """Return torch's computation of ``op`` by other operators, or None."""
    if op in decomposition_table:
        return decomposition_table[op]
    return op.decompose if op._can_decompose() else None


def overloads(name: str) -> Iterator[OpOverload]:
    """The overload ``aten.max.dim``, or nothing if this torch lacks it."""
    namespace, packet, overload = name.split(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    if found is not None and overload in found.overloads():
        yield getattr(found, overload)
