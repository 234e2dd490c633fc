"""Which placements to try for the tensors of one call."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Sequence

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

# For each tensor of a call, one placement for each mesh dimension.
Layout = tuple[tuple[Placement, ...], ...]


def layouts(tensors: Sequence[torch.Tensor], mesh_ndim: int, limit: int, seed: str) -> list[Layout]:
    """Up to ``limit`` layouts: the telling ones first, then others drawn at random.

    The draw depends on ``seed`` alone, so that every run and every version sees the same ones.
    """
    draw = random.Random(hashlib.sha256(seed.encode()).digest())
    if not tensors:
        return []
    found: dict[Layout, None] = {}
    told = list(_told(tensors)) if mesh_ndim == 1 else []
    draw.shuffle(told)
    choices = [options(t) for t in tensors]
    for layout in told:
        found[tuple((p,) for p in layout)] = None
    drawn = limit if mesh_ndim > 1 else max(2, limit - len(told))
    total = 1
    for c in choices:
        total *= len(c) ** mesh_ndim
    if total <= limit:
        for layout in itertools.product(*(itertools.product(c, repeat=mesh_ndim) for c in choices)):
            found[layout] = None
    else:
        for _ in range(drawn):
            found[tuple(tuple(draw.choice(c) for _ in range(mesh_ndim)) for c in choices)] = None
    ordered = list(found)
    if len(ordered) > limit:
        ordered = ordered[: limit - 1] + ordered[-1:]
    return ordered


def options(tensor: torch.Tensor) -> list[Placement]:
    """What one tensor can be on one mesh dimension; dimensions of size 0 and 1 are not sharded."""
    shards = [Shard(dim) for dim, size in enumerate(tensor.shape) if size > 1]
    partial = (
        [Partial()] if tensor.is_floating_point() and tensor.numel() and tensor.itemsize > 1 else []
    )
    return [Replicate(), *shards, *partial]


def _told(tensors: Sequence[torch.Tensor]) -> list[tuple[Placement, ...]]:
    """On one mesh dimension: all sharded alike from the front or the back, or one alone sharded
    or partial.
    """
    everywhere = [options(t) for t in tensors]
    rest: list[Placement] = [Replicate() for _ in tensors]
    found = [tuple(rest)]
    ndim = max(t.ndim for t in tensors)
    for dim in range(ndim):
        front = [Shard(dim) if Shard(dim) in each else Replicate() for each in everywhere]
        back = [
            Shard(t.ndim - 1 - dim) if Shard(t.ndim - 1 - dim) in each else Replicate()
            for t, each in zip(tensors, everywhere, strict=True)
        ]
        found += [tuple(front), tuple(back)]
    for at, each in enumerate(everywhere):
        found += [(*rest[:at], option, *rest[at + 1 :]) for option in each[1:]]
    return list(dict.fromkeys(found))


def describe(layout: Layout) -> str:
    """``(S(0), R) (P)``: one bracket for each tensor."""
    return " ".join("(" + ", ".join(map(_short, each)) + ")" for each in layout)


def _short(placement: Placement) -> str:
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    return "R" if isinstance(placement, Replicate) else "P"
