"""Operators that write, and signs, on tensors whose sums or averages are pending."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from dynamo_dist.sharding.fallback import Decompose
from dynamo_dist.sharding.rows import Call, P, R, Row, Rows, strategy
from dynamo_dist.sharding.rules.elementwise import broadcast
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs
from dynamo_dist.torch_compat import dtensor_specs as specs_compat

AVERAGE = Partial("avg")


def added(call: Call) -> list[Row]:
    """A summand is added to each part of a sum only if it is pending itself: else all would add it."""
    pending = [(each,) * (1 + len(call.tensors)) for each in (P, AVERAGE) if len(call.tensors) == 2]
    return [*broadcast(call), *pending]


def scaled(call: Call) -> list[Row]:
    """A factor that all ranks have scales each part of a sum."""
    pending = [(each, each, *[R] * (len(call.tensors) - 1)) for each in (P, AVERAGE)]
    return [*broadcast(call), *pending]


def copied(decide: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """As ``decide``, but of one pending result over another of the same kind each rank copies its part.

    A graph ends so for every input that it changes, and a copy that gathers could not end one.
    """

    def of_parts(schema: dtensor_specs.OpSchema) -> Any:
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
        masked = any(specs_compat.is_masked(each) for each in placements)
        kind = target.tensor_meta.dtype
        if pending and not (kind.is_floating_point or kind.is_complex) and alike == [False]:
            (source,) = sources
            if source.tensor_meta.dtype != kind:
                raise NotImplementedError(
                    "of fractions, the parts' whole numbers are not the sum's"
                )
        if alike != [True] or not pending or masked:
            return decide(schema)
        kept = dtensor_specs.OpSpec(
            output_specs=specs_compat.spec(target.mesh, placements),
            input_specs=[target, *sources],
            redistribute_cost=[[0.0], [0.0]],
        )
        return dtensor_specs.OpStrategy([kept])

    return of_parts


def filled(stock: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """In the place of torch's, which writes the number into every part of a sum."""
    decide = strategy(broadcast, any_part=True)

    def by_layout(schema: dtensor_specs.OpSchema) -> Any:
        target: Any = schema.args_schema[0]
        placements = target.strategies[0].output_spec.placements
        if {type(each) for each in placements if isinstance(each, Partial)} == {Partial}:
            raise Decompose(fill_parts)
        return decide(schema)

    return by_layout


def fill_parts(self: DTensor, value: Any) -> DTensor:
    """Write parts of which ``value`` is what comes of them. What was pending is not asked for: nothing is launched."""
    everyones = [R if isinstance(each, Partial) else each for each in self.placements]
    known = torch.full_like(self._local_tensor, value)
    self._local_tensor.copy_(specs_compat.relayout(known, self.device_mesh, everyones, self._spec))
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
