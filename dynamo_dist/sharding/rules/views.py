"""Views: where the parts of a sharded tensor are not the parts of its view, the tensor is gathered."""

from __future__ import annotations

import math
import sys
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard

from dynamo_dist.sharding.rows import Call, P, Row, Rows, elements, is_even
from dynamo_dist.sharding.rules.partial import AVERAGE
from dynamo_dist.sharding.rules.reduction import WrapStrategy
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs


def parts_match(decide: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """As ``decide``, if on every rank the part of the result has as many elements as that of the input.

    Along unevenly sharded dimensions that are split or joined they may not: those are gathered.
    """

    def checked(schema: dtensor_specs.OpSchema) -> Any:
        found = decide(schema)
        shape = _new_shape(schema)
        self: Any = schema.args_schema[0]
        before = self.shape
        kept = [
            each
            for each in found.strategies
            if _match(each.input_spec(0), before, each.output_spec, shape)
        ]
        if not kept:
            raise NotImplementedError(f"{schema.op} of unevenly sharded {self}")
        return dtensor_specs.OpStrategy(kept)

    return checked


def _new_shape(schema: dtensor_specs.OpSchema) -> list[Any]:
    self: Any = schema.args_schema[0]
    given: Any = schema.args_schema[1]
    shape = list(given)
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = math.prod(self.shape) // max(known, 1)
    return shape


def _match(source: Any, before: Any, target: Any, after: Any) -> bool:
    if is_even(source, before) and is_even(target, after):
        return True
    plain = all(
        type(p) in (Shard, Replicate, Partial) for p in (*source.placements, *target.placements)
    )
    return plain and elements(source, before) == elements(target, after)


def select_backward(call: Call) -> list[Row]:
    """The gradient of one slice among zeros; torch's own takes negative dimensions for others."""
    ndim = call.ndim("grad_output") + 1
    dim = call.args["dim"] % ndim
    rows = [
        call.row([Shard(d)], grad_output=Shard(d if d < dim else d - 1))
        for d in range(ndim)
        if d != dim
    ]
    return [*rows, call.row([P], grad_output=P)]


def slice_backward(call: Call) -> list[Row]:
    """The gradient of a slice among zeros; that of all of a dimension, as ``x[:]`` is, is one without them."""
    ndim = call.ndim("grad_output")
    args = call.args
    is_all = args["start"] in (None, 0) and is_end(args["end"]) and args["step"] == 1
    cut = None if is_all else args["dim"] % ndim
    rows = [call.row([Shard(d)], grad_output=Shard(d)) for d in range(ndim) if d != cut]
    return [*rows, *(call.row([each], grad_output=each) for each in (P, AVERAGE))]


_END = 3  # of ``slice(self, dim, start, end, step)``


def to_the_end(decide: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """As ``decide``, with an end like that of ``x[:]`` spelled as none.

    Torch cannot tell whether it lies behind a symbolic size, and gathers a dimension that stays whole.
    """

    def spelled_out(schema: dtensor_specs.OpSchema) -> Any:
        args = list(schema.args_schema)
        if len(args) > _END and is_end(args[_END]):
            args[_END] = None
        return decide(
            dtensor_specs.OpSchema(
                schema.op, tuple(args), schema.kwargs_schema, schema_info=schema.schema_info
            )
        )

    return spelled_out


def is_end(value: object) -> bool:
    """Return whether it is the number that stands for the end of any dimension, and no symbol."""
    return type(value) is int and value == sys.maxsize


ROWS: dict[str, Rows] = {
    "aten.select_backward.default": select_backward,
    "aten.slice_backward.default": slice_backward,
}
WRAPPED: dict[str, WrapStrategy] = {
    **dict.fromkeys(
        (
            "aten.view.default",
            "aten._unsafe_view.default",
            "aten.reshape.default",
            "aten.view_copy.default",
        ),
        parts_match,
    ),
    "aten.slice.Tensor": to_the_end,
}
