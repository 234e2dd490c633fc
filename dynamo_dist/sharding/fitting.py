"""Placements that do not fit the mesh or the tensor, named before torch goes on with them.

Torch fails with an index that is out of range, or gives a tensor with more placements than the mesh has
dimensions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from dynamo_dist.errors import StrategyError
from dynamo_dist.torch_compat.changes import Change, SetAttribute


def check(tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Any]) -> None:
    """Raises StrategyError unless each mesh dimension has a placement that the tensor can have."""
    if len(placements) != mesh.ndim:
        raise StrategyError(
            f"{_asked(tensor, placements)}: {len(placements)} placements, expected {mesh.ndim}.",
            f"The mesh, {tuple(mesh.shape)}, has {mesh.ndim} dimensions, each with one placement.",
            "Give as many placements as the mesh has dimensions.",
        )
    for at, placement in enumerate(placements):
        if not isinstance(placement, Placement):
            raise StrategyError(
                f"{_asked(tensor, placements)}: {placement!r} on mesh dimension {at} is no placement.",
                "A tensor is sharded, replicated or pending on each dimension of the mesh.",
                "Give Shard(dim), Replicate() or Partial().",
            )
        dim = getattr(placement, "dim", None)
        if dim is not None and not -tensor.ndim <= dim < tensor.ndim:
            raise StrategyError(
                f"{_asked(tensor, placements)}: dimension {dim} on mesh dimension {at}, expected "
                f"{-tensor.ndim} to {tensor.ndim - 1}.",
                f"The tensor has {tensor.ndim} dimensions.",
                "Shard a dimension that the tensor has.",
            )


def _asked(tensor: DTensor, placements: Sequence[Any]) -> str:
    return f"redistribute of {tuple(tensor.shape)} in {tensor.placements} to {tuple(placements)}"


def redistribute_checked(stock: Callable[..., DTensor]) -> Callable[..., DTensor]:
    """``DTensor.redistribute`` with its placements checked."""

    @functools.wraps(stock)
    def redistribute(
        self: DTensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Any] | None = None,
        **how: Any,
    ) -> DTensor:
        if placements is not None:
            check(self, device_mesh or self.device_mesh, placements)
        return stock(self, device_mesh, placements, **how)

    return redistribute


def changes() -> list[Change]:
    """List the changes that enabling makes to check placements."""
    return [SetAttribute(DTensor, "redistribute", redistribute_checked(DTensor.redistribute))]
