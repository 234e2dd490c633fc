"""Wrappers of parameters that others put around a module: FSDP2, DDP, checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.fx.traceback as _traceback
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy

OTHER_WRAPPERS = (FSDPModule, DistributedDataParallel)


def joined_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """A mesh of ``outer``'s dimensions, then ``inner``'s; RuntimeError if they have no common root."""
    return DeviceMesh._concatenate([outer, inner])


def strided_shard(dim: int, split_factor: int) -> _StridedShard:
    """Shard ``dim`` of what an inner mesh dimension has already split into ``split_factor`` parts."""
    return _StridedShard(dim, split_factor=split_factor)


@contextlib.contextmanager
def recomputed() -> Iterator[None]:
    """What AOTAutograd traces in the block is not kept for backward, which computes it again, as in a checkpoint."""
    known = _traceback.get_current_meta()
    before = known.get("recompute")
    known["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    try:
        yield
    finally:
        if before is None:
            known.pop("recompute", None)
        else:
            known["recompute"] = before
