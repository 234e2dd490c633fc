"""Views, ``as_strided`` among them."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dynamo_dist.errors import StrategyError
from dynamo_dist.sharding import fallback
from dynamo_dist.sharding.rows import Call, P, Row, Rows, elements, is_even
from dynamo_dist.sharding.rules.elementwise import AVERAGE
from dynamo_dist.sharding.rules.reduction import WrapStrategy
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs, dtensor_strategies
from dynamo_dist.torch_compat.patching import Patch


def handler(op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes and strides of the whole tensor's memory: gathered, unless every rank has that memory.

    Raises StrategyError for a view in shards: what lies in memory around it is on no rank.
    """
    tensor, *rest = args
    sizes = [*rest, *kwargs.values()]
    if [list(tensor.shape), list(tensor.stride())] == [list(each) for each in sizes[:2]] and (
        len(sizes) < 3 or sizes[2] in (None, tensor.storage_offset())
    ):
        # The same sizes and strides: the tensor itself, wherever its shards are.
        return torch.ops.aten.alias.default(tensor)
    replicated = all(isinstance(p, Replicate) for p in tensor.placements)
    # Gathering the view alone would not bring the memory around it.
    if not replicated and tensor._is_view() and not _stays_inside(tensor, *sizes):
        raise StrategyError(
            f"{op} of a view in {tensor.placements}: its memory is not on one rank.",
            "Strides of a view reach into the tensor it is a view of, of which each rank has a "
            "part.",
            "Use the view operator that is meant, such as x[...] or x.unfold, or replicate first.",
        )
    whole = tensor
    if not replicated:
        whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        # Strides of the call are of the global tensor's memory; a gather gives contiguous memory.
        if whole._local_tensor.stride() != tensor.stride():
            meta = dtensor_specs.TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
            laid_out = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(whole._local_tensor)
            whole = dtensor_specs.wrap(laid_out, tensor.device_mesh, whole.placements, meta)
    assert isinstance(whole, DTensor)
    return fallback.run(op, (whole, *rest), kwargs)


def _stays_inside(tensor: DTensor, size: Any, stride: Any, offset: int | None = None) -> bool:
    """Return whether all that is asked for are elements of the tensor itself."""
    reach = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return not offset and tensor.is_contiguous() and reach < tensor.numel()


def patches() -> list[Patch]:
    """List the patches that enabling makes for ``as_strided``."""
    return dtensor_strategies.on_dispatch(torch.ops.aten.as_strided.default, handler)


def parts_match(decide: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """As ``decide``, if on every rank the part of the result has as many elements as that of the
    input.

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
        # The fallback gathers and decides again on replicated arguments.
        if not kept:
            raise NotImplementedError(f"{schema.op} of unevenly sharded {self}")
        return dtensor_specs.OpStrategy(kept)

    return checked


def _new_shape(schema: dtensor_specs.OpSchema) -> list[object]:
    self: Any = schema.args_schema[0]
    given: Any = schema.args_schema[1]
    shape = list(given)
    # Inferred here, since the local sizes would give another number.
    if -1 in shape:
        known = math.prod(size for size in shape if size != -1)
        shape[shape.index(-1)] = math.prod(self.shape) // max(known, 1)
    return shape


def _match(source: Any, before: Any, target: Any, after: Any) -> bool:
    # The common case, without a walk over all ranks; it also holds for symbolic sizes.
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
        # The gradient lacks the dimension that was selected from.
        call.row([Shard(d)], grad_output=Shard(d if d < dim else d - 1))
        for d in range(ndim)
        if d != dim
    ]
    return [*rows, call.row([P], grad_output=P)]


def slice_backward(call: Call) -> list[Row]:
    """The gradient of a slice among zeros; that of all of a dimension, as ``x[:]`` is, is one
    without them.
    """
    ndim = call.ndim("grad_output")
    args = call.args
    # A slice of everything keeps each shard complete, so that dimension may stay sharded too.
    is_all = args["start"] in (None, 0) and is_end(args["end"]) and args["step"] == 1
    cut = None if is_all else args["dim"] % ndim
    rows = [call.row([Shard(d)], grad_output=Shard(d)) for d in range(ndim) if d != cut]
    return [*rows, *(call.row([each], grad_output=each) for each in (P, AVERAGE))]


_END = 3  # of ``slice(self, dim, start, end, step)``


def to_the_end(decide: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """Call ``decide`` with None for an end like that of ``x[:]``.

    Torch cannot decide whether such an end exceeds a symbolic size, and gathers a dimension that
    stays complete.
    """

    def spelled_out(schema: dtensor_specs.OpSchema) -> object:
        args = list(schema.args_schema)
        # Python writes ``x[:]`` with the largest integer as its end.
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
