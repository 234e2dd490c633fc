"""All ranks of a mesh in one process: split a tensor over them, and join what they hold.

Both are written from what the placements mean, without DTensor's redistribution, so that an error
in redistribution shows as a difference and does not cancel itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from dynamo_dist.testing import fake_mesh
from dynamo_dist.torch_compat import dtensor_ranks, dtensor_specs


class LayoutError(AssertionError):
    """The ranks of a DTensor do not hold what its placements say; the message says which and
    how.
    """


@contextlib.contextmanager
def all_ranks(*sizes: int) -> Iterator[DeviceMesh]:
    """A mesh of the given sizes with every rank in this process; collectives move real data.

    Ops on DTensors of this mesh run once for each rank. Raises RuntimeError if a process group is
    initialised already.
    """
    world = frozenset(range(math.prod(sizes)))
    with (
        fake_mesh(*sizes) as mesh,
        dtensor_specs.LocalTensorMode(world),
        dtensor_ranks.fit_for_all_ranks(),
    ):
        yield mesh


def split(
    full: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    requires_grad: bool = False,
) -> DTensor:
    """Distribute ``full`` over all ranks of a mesh of ``all_ranks()``, as a leaf.

    ``placements`` are Shard, Replicate or Partial("sum"); the summands of a Partial are unequal.
    """
    # Made inside all_ranks(), it is one tensor for each rank already, which must agree.
    full = (full.reconcile() if isinstance(full, dtensor_specs.LocalTensor) else full).detach()
    parts = {}
    with dtensor_ranks.one_device():
        for rank in range(mesh.size()):
            part = full
            for size, at, placement in zip(
                mesh.shape, _coordinate(rank, mesh.shape), placements, strict=True
            ):
                part = _part(part, placement, size, at)
            parts[rank] = part.clone(memory_format=torch.preserve_format)
    return dtensor_ranks.dtensor_of_ranks(
        dtensor_specs.LocalTensor(parts), mesh, placements, full, requires_grad
    )


def whole_tensor(distributed: DTensor, same_replicas: bool = True) -> torch.Tensor:
    """The whole tensor that all ranks of ``distributed`` hold together.

    Raises LayoutError if a local shape is not the one that global shape and placements give, or,
    with ``same_replicas``, if ranks that must hold the same differ.
    """
    mesh, placements = distributed.device_mesh, distributed.placements
    local = distributed._local_tensor
    if not dtensor_ranks.are_all_ranks_here():
        return _joined_by_all(distributed)
    if any(type(p) not in (Shard, Replicate, Partial) for p in placements):
        return _parts(_full(distributed), 1)[0]
    parts = _parts(local, mesh.size())
    for rank, part in parts.items():
        expected = local_shape_on(distributed.shape, mesh.shape, placements, rank)
        if tuple(part.shape) != expected:
            raise LayoutError(
                f"rank {rank} holds local shape {tuple(part.shape)}, expected {expected}: global "
                f"shape {tuple(distributed.shape)} in {placements}"
            )
    held = [parts[rank] for rank in range(mesh.size())]
    for dim in reversed(range(mesh.ndim)):
        size = mesh.shape[dim]
        groups = [held[at : at + size] for at in range(0, len(held), size)]
        held = [_joined(group, placements[dim], same_replicas) for group in groups]
    return held[0]


def _joined_by_all(distributed: DTensor) -> torch.Tensor:
    """The same where each rank is a process: every one of them calls this."""
    mesh, placements = distributed.device_mesh, distributed.placements
    if all(type(p) in (Shard, Replicate, Partial) for p in placements):
        at = mesh.get_coordinate()
        rank = sum(i * math.prod(mesh.shape[dim + 1 :]) for dim, i in enumerate(at or ()))
        found = tuple(distributed._local_tensor.shape)
        expected = local_shape_on(distributed.shape, mesh.shape, placements, rank)
        if found != expected:
            raise LayoutError(f"this rank holds local shape {found}, expected {expected}")
    whole = _full(distributed)
    # A wait is left to the first use of an asynchronous result.
    return whole.wait() if hasattr(whole, "wait") else whole


def _full(distributed: DTensor) -> torch.Tensor:
    with torch.no_grad():
        return distributed.full_tensor().detach()


def local_shape_on(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], rank: int
) -> tuple[int, ...]:
    """The local shape on ``rank`` of a tensor of global ``shape``: shards as ``torch.chunk``
    makes them.
    """
    found = list(shape)
    for size, at, placement in zip(
        mesh_shape, _coordinate(rank, mesh_shape), placements, strict=True
    ):
        if isinstance(placement, Shard):
            dim = placement.dim
            start, end = _bounds(found[dim], size, at)
            found[dim] = end - start
    return tuple(found)


def _coordinate(rank: int, mesh_shape: Sequence[int]) -> tuple[int, ...]:
    found = []
    for size in reversed(mesh_shape):
        rank, at = divmod(rank, size)
        found.append(at)
    return tuple(reversed(found))


def _bounds(length: int, size: int, at: int) -> tuple[int, int]:
    chunk = -(-length // size)
    return min(at * chunk, length), min((at + 1) * chunk, length)


def _part(full: torch.Tensor, placement: Placement, size: int, at: int) -> torch.Tensor:
    if isinstance(placement, Shard):
        start, end = _bounds(full.shape[placement.dim], size, at)
        return full.narrow(placement.dim, start, end - start)
    if isinstance(placement, Partial):
        if not (full.is_floating_point() or full.is_complex()):
            return full if at == 0 else torch.zeros_like(full)
        weight = _weight(size, at)
        # Infinities would cancel to nan: the first rank alone holds them.
        return torch.where(full.isfinite(), full * weight, full if at == 0 else 0).to(full.dtype)
    return full


def _weight(size: int, at: int) -> int:
    """Of one summand of a whole: they differ, some are negative, and halves would hide a lost one.

    Each is a power of two, and so is each sum from the first rank on, down to 1: adding up in that
    order is exact, and an operator on bits can be compared.
    """
    sums = [2 ** (3 - abs(3 - left % 6)) for left in reversed(range(size))]
    return sums[at] - (sums[at - 1] if at else 0)


def _joined(group: list[torch.Tensor], placement: Placement, same_replicas: bool) -> torch.Tensor:
    if isinstance(placement, Shard):
        return torch.cat(group, placement.dim)
    if isinstance(placement, Partial):
        stacked = torch.stack(group)
        if placement.reduce_op in ("sum", "product"):
            total = stacked.sum(0) if placement.reduce_op == "sum" else stacked.prod(0)
            return total.to(group[0].dtype)  # of bools torch makes whole numbers
        if placement.reduce_op == "avg":
            return stacked.mean(0)
        if placement.reduce_op in ("max", "min"):
            return getattr(torch, f"a{placement.reduce_op}")(stacked, 0)
        raise LayoutError(f"Partial of unknown reduction {placement.reduce_op!r}")
    for at, other in enumerate(group[1:], 1):
        if same_replicas and not _same(group[0], other):
            raise LayoutError(f"replicas 0 and {at} differ")
    return group[0]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout != torch.strided:
        one, other = one.to_dense(), other.to_dense()
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    # Float8 and the like have no nan_to_num: wider, they have the same values.
    wide = torch.complex128 if one.is_complex() else torch.float64
    return torch.equal(one.to(wide).nan_to_num(), other.to(wide).nan_to_num())


def _parts(local: torch.Tensor, ranks: int) -> dict[int, torch.Tensor]:
    if isinstance(local, dtensor_specs.LocalTensor):
        return {rank: resolved(part) for rank, part in local._local_tensors.items()}
    return dict.fromkeys(range(ranks), resolved(local))


def resolved(part: torch.Tensor) -> torch.Tensor:
    """Without autograd, conjugations and negations that are only noted done: below it none are
    seen.
    """
    return part.detach().resolve_conj().resolve_neg()
