"""Random operators that torch draws for each shard alike: here every shard draws its own numbers.

Torch's dispatcher knows twelve random operators, and gives their shards numbers of their own where the
device can; ``randomness.shards`` does so elsewhere. These are the others whose results follow their
arguments element by element, and ``multinomial``, which does row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate

from dynamo_dist.sharding import gathered
from dynamo_dist.sharding.fallback import INTO_A_SUM, is_pending, random
from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.dtensor import calls, operators, specs, strategies, types
from dynamo_dist.trace.randomness import shards

_IN_PLACE = """
    bernoulli_.Tensor cauchy_.default exponential_.default geometric_.default log_normal_.default
    random_.default random_.from random_.to
""".split()
_FUNCTIONAL = """
    bernoulli.Tensor bernoulli.p binomial.default cauchy.default exponential.default geometric.default
    log_normal.default normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor normal_functional.default
    poisson.default randint_like.Tensor random.default random.from random.to _standard_gamma.default
    uniform.default rrelu_with_noise.default rrelu_with_noise_functional.default
""".split()
_BY_ROWS = "multinomial.default"


def handler(op: types.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``op`` on the local tensors, laid out as the first argument of the result's shape.

    Raises StrategyError for numbers drawn into a pending sum, and for plain tensors among DTensors.
    """
    mesh = gathered.mesh_of(op, args, kwargs)
    tensors = [each for each in args if isinstance(each, DTensor)]
    in_place = op._schema.name.endswith("_")
    if in_place and is_pending(args[0]):
        raise random(op, args, kwargs, INTO_A_SUM)
    shape = torch.broadcast_shapes(*(each.shape for each in tensors))
    whole = next((each for each in tensors if each.shape == shape), None)
    placements = _placements(op, whole, mesh.ndim)
    spec = specs.spec(mesh, placements, types.TensorMeta(shape, (), tensors[0].dtype))
    if not specs.is_here(mesh):
        return args[0] if in_place else _wrapped(op, _nothing(op, tensors[0]), spec, args)
    local = [_local(each, shape, placements) for each in args]
    if not all(_is_written(*each) for each in zip(op._schema.arguments, args, local, strict=False)):
        raise random(op, args, kwargs, "What it writes would reach a copy in another layout alone.")
    results = shards.draw(op, shards.position(mesh, placements), tuple(local), kwargs)
    if in_place:
        return args[0]
    return calls.tree_map(lambda value: _wrapped(op, value, spec, args), results)


def _placements(op: types.OpOverload, whole: DTensor | None, mesh_dims: int) -> list[Placement]:
    """Return the argument's placements, but for what pends and, by rows, what splits one; replicas without it."""
    if whole is None:
        return [Replicate()] * mesh_dims

    row_dim = whole.ndim - 1 if _is_by_rows(op) else None

    def fits(placement: Any) -> bool:
        return shards.holds_parts(placement) and placement.dim != row_dim

    return [each if fits(each) else Replicate() for each in whole.placements]


def _is_written(argument: Any, value: Any, local: Any) -> bool:
    """Return whether what the operator writes to an argument, if anything, reaches the argument itself."""
    writes = argument.alias_info is not None and argument.alias_info.is_write
    return not writes or local is value._local_tensor


def _nothing(op: types.OpOverload, tensor: DTensor) -> torch.Tensor:
    """Return the empty result of a rank outside of the mesh."""
    dtype = torch.int64 if _is_by_rows(op) else tensor.dtype
    return tensor._local_tensor.new_empty((0,), dtype=dtype)


def _is_by_rows(op: types.OpOverload) -> bool:
    return str(op) == f"aten.{_BY_ROWS}"


def _local(value: Any, shape: torch.Size, placements: Sequence[Placement]) -> Any:
    if not isinstance(value, DTensor):
        return value
    if value.shape != shape:
        value = value.expand(shape)
    if value.placements != tuple(placements):
        value = value.redistribute(placements=placements)
    return value._local_tensor


def _wrapped(op: types.OpOverload, value: Any, spec: Any, args: tuple[Any, ...]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    shape = spec.shape
    if _is_by_rows(op):
        shape = torch.Size((*shape[:-1], args[1]))
    # Strides follow those of an argument, as in torch; else they are of rows.
    of = next((t for t in args if isinstance(t, DTensor) and t.shape == shape), None)
    if of is not None and value.stride() == of._local_tensor.stride():
        stride = of.stride()
    else:
        stride = torch.empty(shape, device="meta").stride()
    meta = types.TensorMeta(shape, stride, value.dtype)
    return specs.wrap(value, spec.mesh, spec.placements, meta)


def changes() -> list[Change]:
    """List the changes that enabling makes for these operators."""
    return [
        change
        for name in (*_IN_PLACE, *_FUNCTIONAL, _BY_ROWS)
        for op in operators.overloads(f"aten.{name}")
        for change in strategies.on_dispatch(op, handler)
    ]
