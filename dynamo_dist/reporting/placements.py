"""The change of placement that caused a collective, noted on the node while DTensor is traced."""

from __future__ import annotations

from typing import Any

from dynamo_dist.torch_compat import dtensor_placements
from dynamo_dist.torch_compat.patching import Change
from inductor_passes.graph.printing import CAUSE


def changes() -> list[Change]:
    """List the changes that enabling makes, so that a cached graph's record has the cause too."""
    return [*dtensor_placements.redistribute_changes(change_of_placement, CAUSE)]


def change_of_placement(current: Any, target: Any, op: str) -> str:
    """``Shard(0) -> Replicate() on tp, for aten.mm.default``: each mesh dimension that changes."""
    mesh = current.mesh
    names = mesh.mesh_dim_names or [f"mesh dim {i}" for i in range(mesh.ndim)]
    parts = [
        f"{_said(old)} -> {_said(new)} on {name}"
        for name, old, new in zip(names, current.placements, target.placements, strict=True)
        if old != new
    ]
    return ", ".join(parts) + (f", for {op}" if op else "")


def _said(placement: Any) -> str:
    return repr(placement).replace("dim=", "")
