"""Placements and meshes as words, as plans hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from dynamo_dist.errors import PlanError
from dynamo_dist.program import MeshInfo, Spec, Value

_opaque: dict[str, Placement] = {}


def word(placement: Placement) -> str:
    """``R``, ``S0``, ``P``, or the placement's own text."""
    if type(placement) is Replicate:
        return "R"
    if type(placement) is Shard:
        return f"S{placement.dim}"
    if type(placement) is Partial:
        return "P" if placement.reduce_op == "sum" else f"P{placement.reduce_op}"
    _opaque[f"?{placement}"] = placement
    return f"?{placement}"


def placement(text: str) -> Placement:
    """Inverse of ``word``, in this process. Raises PlanError for a word that no tensor here gave."""
    if text == "R":
        return Replicate()
    if text[0] == "S":
        return Shard(int(text[1:]))
    if text[0] == "P":
        return Partial(text[1:] or "sum")
    if text not in _opaque:
        raise PlanError(
            f"The plan names the placement {text!r}, which no tensor of this program has.",
            "The program, or the file, has changed since it was planned.",
            "Delete the plan file to plan anew.",
        )
    return _opaque[text]


def can_lie(tensor: DTensor, spec: Spec) -> bool:
    """Return whether there is a place for each mesh dimension, and a dimension for each place."""
    dims = [int(text[1:]) for text in spec if text[0] == "S"]
    return len(spec) == tensor.device_mesh.ndim and all(dim < tensor.ndim for dim in dims)


def words(placements: Sequence[Placement]) -> Spec:
    """A spec of the planner."""
    return tuple(word(p) for p in placements)


def value_of(tensor: Any) -> Value:
    """Global shape and dtype of a DTensor or of what DTensor keeps as its metadata."""
    return Value(
        tuple(int(size) for size in tensor.shape),
        str(tensor.dtype).removeprefix("torch."),
        tensor.dtype.itemsize,
    )


def mesh_info(mesh: DeviceMesh) -> MeshInfo:
    """Sizes, and the ranks of the first group of each dimension: the same on every rank."""
    ranks = mesh.mesh
    groups = tuple(
        tuple(int(r) for r in ranks.movedim(d, -1).reshape(-1, ranks.size(d))[0])
        for d in range(mesh.ndim)
    )
    world = torch.distributed.get_world_size()
    return MeshInfo(tuple(mesh.shape), groups, max(world, int(ranks.max()) + 1))


def is_spec(value: object) -> bool:
    """Return whether ``value`` stands for a DTensor in a schema."""
    return isinstance(value, DTensorSpec)
