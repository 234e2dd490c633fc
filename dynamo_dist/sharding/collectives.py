"""Collectives of c10d that are given DTensors.

A rank's part of a DTensor is no tensor of its own, so what a collective makes of the parts is wrong
in their placements, with one exception: a group whose ranks all stand at one place of the mesh,
each with the same part of a DTensor of its own. Gradients of data parallelism that are summed over
a tensor parallel group are such. There, element by element, the parts are computed as the whole
would be.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial

from dynamo_dist.errors import StrategyError
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs, dtensor_strategies
from dynamo_dist.torch_compat.patching import Patch

# Element by element, each result of its input's shape.
ELEMENTWISE = (
    "c10d.allreduce_.default",
    "c10d.allreduce_coalesced_.default",
    "c10d.broadcast_.default",
    "c10d.reduce_.default",
    "_c10d_functional.all_reduce.default",
    "_c10d_functional.all_reduce_.default",
    "_c10d_functional.all_reduce_coalesced.default",
    "_c10d_functional.all_reduce_coalesced_.default",
    "_c10d_functional.broadcast.default",
    "_c10d_functional.broadcast_.default",
)
# Neither changes a value.
WAITS = ("_c10d_functional.wait_tensor.default", "_c10d_functional._wrap_tensor_autograd.default")
# Namespaces of collectives: on gathered arguments each would compute another thing.
NAMESPACES = (
    "c10d",
    "c10d_functional",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "symm_mem",
)
# What is pending as a sum can be added to others that are, or be divided.
LINEAR = ("sum", "avg")


def handler(
    op: dtensor_specs.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> Any:
    """The collective on local tensors; raises StrategyError where the result would be none of
    the whole.
    """
    given = [
        each for each in dtensor_dispatch.tree_leaves((args, kwargs)) if isinstance(each, DTensor)
    ]
    ranks, reduction = dtensor_specs.group_and_reduction(op, args, kwargs)
    for tensor in given:
        # Ranks at one place of their meshes hold the same part, each of a tensor of its own.
        if ranks is None or not dtensor_specs.is_beside(tensor.device_mesh, ranks):
            refuse(op, tensor, "on a group that is not beside its mesh")
        # A maximum of summands is not the maximum of the sums.
        if reduction not in (None, *LINEAR) and any(map(_is_partial, tensor.placements)):
            refuse(op, tensor, f"with {reduction}, of which no part is known yet")
    return on_local_tensors(op, args, kwargs)


def on_local_tensors(
    op: dtensor_specs.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Results are laid out as the DTensors in their order; what is written to is what was given."""
    given = [
        each for each in dtensor_dispatch.tree_leaves((args, kwargs)) if isinstance(each, DTensor)
    ]
    local = dtensor_dispatch.tree_map_only(DTensor, lambda each: each._local_tensor, (args, kwargs))
    results = op(*local[0], **local[1])
    before, in_order = {id(each._local_tensor): each for each in given}, iter(given)

    def wrapped(result: torch.Tensor) -> DTensor:
        like = next(in_order)
        if id(result) in before:
            return before[id(result)]
        placed: DTensor = dtensor_specs.wrap(
            result, like.device_mesh, like.placements, like._spec.tensor_meta
        )
        return placed

    return dtensor_dispatch.tree_map_only(torch.Tensor, wrapped, results)


def refuse(op: dtensor_specs.OpOverload, tensor: DTensor, where: str) -> None:
    """Raises StrategyError for the collective ``op`` on ``tensor``."""
    raise StrategyError(
        f"{op} cannot run on a DTensor in {tensor.placements} of {tensor.device_mesh} {where}.",
        "Ranks hold parts of one tensor, and what the collective makes of the parts is not what it "
        "would make of the tensor.",
        "Use tensor.redistribute(...) or tensor.full_tensor() to bring the parts together, or give "
        "the collective tensor.to_local() if the parts are meant; or register a strategy with "
        "dynamo_dist.sharding.register_strategy.",
    )


def _is_partial(placement: object) -> bool:
    return isinstance(placement, Partial)


def patches() -> list[Patch]:
    """List the patches that enabling makes for collectives that are given DTensors."""
    return [
        *(
            patch
            for name in ELEMENTWISE
            for op in dtensor_dispatch.overloads(name)
            for patch in dtensor_strategies.on_dispatch(op, handler)
        ),
        *(
            patch
            for name in WAITS
            for op in dtensor_dispatch.overloads(name)
            for patch in dtensor_strategies.on_dispatch(op, on_local_tensors)
        ),
    ]
