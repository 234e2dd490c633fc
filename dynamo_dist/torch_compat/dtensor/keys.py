"""Eager's cache of decisions, in C++."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dispatch import OpDispatcher
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding

from dynamo_dist.torch_compat.changes import Change, WrapAttribute

# Of numbers where a tensor may stand, by the dtype they have there.
_NUMBERS = {torch.float64: 1.0, torch.int64: 1, torch.bool: True, torch.complex128: 1j}


def one_decision_for_numbers() -> list[Change]:
    """Have a number and a replicated tensor of no dimensions, in one place, decided alike.

    The cache's key has the same entry for both: ``x - 1.0`` was served what ``x - t`` had been decided,
    a pending sum from which every rank takes 1, and the other way round it failed. Both are decided as
    the number is, and the decision names a layout for either.
    """

    def deciding(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def propagate(
            self: Any, op: OpOverload, args: Any, kwargs: Any, op_info: Any, *rest: Any
        ) -> Any:
            schema = op_info.schema
            alike = _alike(schema) if _takes_numbers(op) else {}
            if not alike:
                return stock(self, op, args, kwargs, op_info, *rest)
            values = list(schema.args_schema)
            for at, spec in alike.items():
                values[at] = _NUMBERS[spec.tensor_meta.dtype]  # type: ignore[union-attr]
            op_info.schema = OpSchema(
                op, tuple(values), schema.kwargs_schema, schema_info=schema.schema_info
            )
            try:
                found = stock(self, op, args, kwargs, op_info, *rest)
            finally:
                op_info.schema = schema
            if isinstance(found, OutputSharding) and not found.use_val_from_redistribute_schema:
                moved = found.redistribute_schema
                if moved is not None:
                    moved.args_schema = tuple(
                        alike.get(at, value) for at, value in enumerate(moved.args_schema)
                    )
            return found

        return propagate

    name = "_propagate_op_sharding_dispatch_slow_path"
    return [WrapAttribute(OpDispatcher, name, deciding)]


def _takes_numbers(op: OpOverload) -> bool:
    """Return whether a number may stand where the schema of ``op`` has a tensor, and each element is by itself."""
    name = op._schema.name.partition("::")[2]
    return torch.Tag.pointwise in op.tags and torch._C._should_allow_numbers_as_tensors(name)


def _alike(schema: OpSchema) -> dict[int, DTensorSpec]:
    """Layouts of the arguments after the first that are numbers for the key, by position."""
    found = {}
    for at, argument in enumerate(schema.op._schema.arguments[: len(schema.args_schema)]):
        value = schema.args_schema[at]
        if at == 0 or str(argument.type) != "Tensor":
            continue
        if isinstance(value, DTensorSpec):
            meta = value.tensor_meta
            whole = all(isinstance(each, Replicate) for each in value.placements)
            if meta is not None and not meta.shape and whole and meta.dtype in _NUMBERS:
                found[at] = value
        else:
            dtype = next((d for d, number in _NUMBERS.items() if type(number) is type(value)), None)
            if dtype is not None:
                mesh = schema.get_mesh_from_args()
                meta = TensorMeta(torch.Size(()), (), dtype)
                found[at] = DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=meta)
    return found
