"""One parameter -> its sharded DTensor, and how to read it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dynamo_dist.errors import DataParallelError
from dynamo_dist.parallel.gather import Gather, Ranks, TensorParallel
from dynamo_dist.torch_compat import wrappers


@dataclass(frozen=True)
class Layout:
    """The mesh of data parallel ranks and what they hold: the arguments of ``data_parallel``, resolved."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]  # per dimension of ``mesh``: Shard(0) or Replicate()
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    reshard_after_forward: bool

    def ranks(self, kind: type[Placement]) -> tuple[int, Ranks] | None:
        """This rank's place along the dimension of ``kind``, and the group along it."""
        for dim, placement in enumerate(self.placements):
            if isinstance(placement, kind):
                group = Ranks(self.mesh.get_group(dim).group_name, self.mesh.size(dim))
                return self.mesh.get_local_rank(dim), group
        return None


def shard(name: str, param: nn.Parameter, layout: Layout) -> tuple[nn.Parameter, Gather]:
    """Keep this rank's chunk of rows of ``param``; every rank holds the same ``param`` before.

    Dimension 0 is split as ``torch.chunk`` does, so the last ranks may hold fewer rows or none; a
    parameter without dimensions stays whole. One that is a DTensor on another mesh (tensor
    parallel) is split further, and becomes a DTensor on both.
    """
    before = _tensor_parallel(name, param, layout)
    local = (param.to_local() if isinstance(param, DTensor) else param).detach()
    along = layout.ranks(Shard) if local.ndim else None
    placements = list(layout.placements) if along else [Replicate() for _ in layout.placements]
    mesh, shape, stride = layout.mesh, local.shape, local.contiguous().stride()
    rows = local.shape[0] if local.ndim else 0
    # A clone, so that the memory of the whole parameter is freed.
    chunk = (_chunk(local, *along) if along else local).clone(memory_format=torch.contiguous_format)
    if before is not None:
        splits = _splits(before, dim=0)
        if along and splits > 1:
            if rows % along[1].size or before.shape[0] % splits:
                raise DataParallelError(
                    f"parameter {name!r} has {rows} rows per tensor parallel rank, which "
                    f"{along[1].size} data parallel ranks cannot share evenly.",
                    "Uneven chunks of a dimension that two mesh dimensions split have no placement.",
                    "Pad dimension 0, or shard it on another dimension in the tensor parallel plan.",
                )
            placements = [
                wrappers.strided_shard(0, splits) if isinstance(each, Shard) else each
                for each in placements
            ]
        mesh, placements = (
            wrappers.joined_mesh(mesh, before.mesh),
            [*placements, *before.placements],
        )
        shape, stride = before.shape, before.stride
    sharded = DTensor.from_local(
        chunk, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    replicas = layout.ranks(Replicate)
    copies = replicas[1] if replicas else None
    if along is None and (split := layout.ranks(Shard)) is not None:
        copies = _only(name, layout, copies, split[1])
    gather = Gather(
        rows=rows,
        shard=along[1] if along else None,
        replicate=copies,
        param_dtype=layout.param_dtype,
        reduce_dtype=layout.reduce_dtype,
        reshard_after_forward=layout.reshard_after_forward,
        tensor_parallel=before,
    )
    return nn.Parameter(sharded, requires_grad=param.requires_grad), gather


def _only(name: str, layout: Layout, copies: Ranks | None, split: Ranks) -> Ranks:
    if copies is not None:
        raise DataParallelError(
            f"parameter {name!r} has no dimension to shard.",
            'mode="hybrid" shards each parameter over the second dimension of the mesh.',
            "Give it one dimension: nn.Parameter(torch.ones(1)).",
        )
    return split


def _chunk(local: torch.Tensor, rank: int, ranks: Ranks) -> torch.Tensor:
    size = -(-local.shape[0] // ranks.size)
    return local[min(rank * size, local.shape[0]) : (rank + 1) * size]


def _tensor_parallel(name: str, param: nn.Parameter, layout: Layout) -> TensorParallel | None:
    if not isinstance(param, DTensor):
        return None
    if any(placement.is_partial() for placement in param.placements):
        raise DataParallelError(
            f"parameter {name!r} has placements {param.placements}.",
            "A parameter that is a pending sum has no value of its own.",
            "Redistribute it to Shard or Replicate first.",
        )
    mine = {group.group_name for group in layout.mesh.get_all_groups()}
    theirs = {group.group_name for group in param.device_mesh.get_all_groups()}
    if mine & theirs:
        raise DataParallelError(
            f"parameter {name!r} is already a DTensor on {param.device_mesh}.",
            f"data_parallel would split it over {layout.mesh} a second time.",
            "Pass another dimension of the mesh, or the module before it was distributed.",
        )
    return TensorParallel(param.device_mesh, param.placements, param.shape, param.stride())


def _splits(tensor: TensorParallel, dim: int) -> int:
    count = 1
    for size, placement in zip(tensor.mesh.shape, tensor.placements, strict=True):
        if placement.is_shard(dim):
            count *= size
    return count
