"""``distribute_tensor`` with a source rank, while tracing.

Upstream calls a placement's method inside the graph, and that method scatters by an operator of
c10d whose writes functionalization does not see: all ranks but the source would get memory that
nobody wrote to. Here the same scatter or broadcast is traced as the program's own call.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from dynamo_dist.torch_compat import dynamo_building, dynamo_dtensors, dynamo_trackers
from dynamo_dist.torch_compat.patching import Patch


def distribute(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], src: int | None
) -> DTensor:
    """Traced: the DTensor of ``tensor``, global shape, as the rank ``src`` of each mesh dimension
    has it.

    None stands for every rank for itself: nothing is sent.

    Raises, like torch's, RuntimeError for a tensor that is no leaf and ValueError for another
    number of placements than mesh dimensions.
    """
    if not tensor.is_leaf:
        raise RuntimeError(
            "`distribute_tensor` should be used to distribute leaf tensors! but found non-leaf "
            "tensor!"
        )
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"`placements` must have the same length as `device_mesh.ndim`! Found placements "
            f"length: {len(placements)}, and device_mesh.ndim: {mesh.ndim}."
        )
    local = tensor.detach()
    if local.device.type != mesh.device_type:
        local = local.to(mesh.device_type)
    found: list[Placement] = []
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            dim = placement.dim + tensor.ndim if placement.dim < 0 else placement.dim
            if src is None:
                local = own_part(local, dim, mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim))
            else:
                local = scattered(local, dim, mesh, mesh_dim, src)
            found.append(Shard(dim))
        else:
            if src is not None:
                local = local.contiguous()
                dist.broadcast(local, group=mesh.get_group(mesh_dim), group_src=src)
            if isinstance(placement, Partial):
                local = placement._partition_value(local, mesh, mesh_dim)
            found.append(placement)
    return DTensor.from_local(
        local, mesh, found, run_check=False, shape=tensor.size(), stride=tensor.stride()
    )


def own_part(tensor: torch.Tensor, dim: int, count: int, here: int) -> torch.Tensor:
    """Traced: part ``here`` of ``count`` along a dimension; the last parts may be shorter, or
    empty.
    """
    size = tensor.size(dim)
    length = (size + count - 1) // count
    start = min(here * length, size)
    return tensor.narrow(dim, start, min(length, size - start)).contiguous()


def scattered(
    tensor: torch.Tensor, dim: int, mesh: DeviceMesh, mesh_dim: int, src: int
) -> torch.Tensor:
    """Traced: this rank's part of the source's tensor; parts are padded to one length for the
    scatter.
    """
    count, here = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim)
    size = tensor.size(dim)
    length = (size + count - 1) // count
    lengths = [max(min(length, size - part * length), 0) for part in range(count)]
    output = torch.empty_like(_padded(tensor, dim, 0, lengths[0], length))
    parts = None
    if here == src:
        parts = [
            _padded(tensor, dim, min(part * length, size), lengths[part], length)
            for part in range(count)
        ]
    dist.scatter(output, parts, group=mesh.get_group(mesh_dim), group_src=src)
    return output if lengths[here] == length else output.narrow(dim, 0, lengths[here]).contiguous()


def _padded(tensor: torch.Tensor, dim: int, start: int, have: int, want: int) -> torch.Tensor:
    part = tensor.narrow(dim, start, have)
    if have != want:
        shape = list(part.shape)
        shape[dim] = want - have
        part = torch.cat([part, part.new_zeros(shape)], dim)
    return part.contiguous()


_SIGNATURE = inspect.signature(
    lambda tensor, device_mesh=None, placements=None, *, src_data_rank=0: None
)


def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Ours for plain tensors and a source rank; upstream traces what needs no communication."""
    try:
        bound = _SIGNATURE.bind(*args, **kwargs)
    except TypeError:
        return None  # upstream raises what eager raises
    bound.apply_defaults()
    given = bound.arguments
    tensor = given["tensor"]
    src = given["src_data_rank"]
    src = src if isinstance(src, int) else src.as_python_constant()
    if src is None or given["device_mesh"] is None or dynamo_dtensors.is_tensor_of(tensor, DTensor):
        return None
    if dynamo_dtensors.requires_grad(tensor):
        return None  # ends in the constructor, which says why that cannot be traced
    placements = given["placements"]
    if placements is None or dynamo_building.constants([placements], {}) == ([None], {}):
        ndim = dynamo_building.python_object(given["device_mesh"]).ndim
        placements = dynamo_building.build_list(
            tx, [dynamo_building.build(tx, Replicate()) for _ in range(ndim)]
        )
    for placement in dynamo_building.items_of(tx, placements):
        kind = type(dynamo_building.python_object(placement))
        if not issubclass(kind, (Shard, Replicate, Partial)):
            dynamo_building.graph_break(
                "Tensor distributed from one rank in an unusual placement",
                f"distribute_tensor(..., placements with {kind.__name__})",
                "How the source's data becomes this placement is code that cannot be traced.",
                "If all ranks hold the same tensor: distribute_tensor(..., src_data_rank=None)",
            )
    return dynamo_building.call_traced(
        tx,
        distribute,
        [tensor, given["device_mesh"], placements, dynamo_building.build(tx, src)],
        {},
    )


def patches() -> list[Patch]:
    """List the patches that enabling makes for ``distribute_tensor``."""
    return dynamo_trackers.on_function(distribute_tensor, answer)
