"""Wrappers of parameters that others put around a module: FSDP2, DDP, checkpoints."""

from __future__ import annotations

import torch._higher_order_ops.wrap as _wrap
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

OTHER_WRAPPERS = (FSDPModule, DistributedDataParallel)
# Whether checkpointing in a compiled function marks what autograd functions do inside; seen from 2.12 on.
# A torch before needs a context_fn for that, of which it warns at every compile.
CHECKPOINT_REACHES_INSIDE = hasattr(_wrap, "_always_prefer_recompute")


def joined_mesh(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """A mesh of ``outer``'s dimensions, then ``inner``'s; RuntimeError if they have no common root."""
    return DeviceMesh._concatenate([outer, inner])


def strided_shard(dim: int, split_factor: int) -> _StridedShard:
    """Shard ``dim`` of what an inner mesh dimension has already split into ``split_factor`` parts."""
    return _StridedShard(dim, split_factor=split_factor)
