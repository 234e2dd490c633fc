"""Operators that write, and signs, on tensors whose sums or averages are pending."""

from __future__ import annotations

from torch.distributed.tensor import Partial

from dynamo_dist.sharding.elementwise import broadcast
from dynamo_dist.sharding.layout import Call, P, R, Row, Rows

AVERAGE = Partial("avg")


def added(call: Call) -> list[Row]:
    """A summand is added to each part of a sum only if it is pending itself: else all would add it."""
    pending = [(each,) * (1 + len(call.tensors)) for each in (P, AVERAGE) if len(call.tensors) == 2]
    return [*broadcast(call), *pending]


def scaled(call: Call) -> list[Row]:
    """A factor that all ranks have scales each part of a sum."""
    pending = [(each, each, *[R] * (len(call.tensors) - 1)) for each in (P, AVERAGE)]
    return [*broadcast(call), *pending]


ROWS: dict[str, Rows] = {
    **{f"aten.fill{name}": broadcast for name in ("_.Scalar", "_.Tensor", ".Scalar", ".Tensor")},
    **{f"aten.{op}.{kind}": added for op in ("add_", "sub_") for kind in ("Tensor", "Scalar")},
    **{f"aten.{op}.{kind}": scaled for op in ("mul_", "div_") for kind in ("Tensor", "Scalar")},
    **{f"aten.{view}.default": scaled for view in ("_neg_view", "_conj")},
}
