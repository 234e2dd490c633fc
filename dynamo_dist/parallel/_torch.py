"""Private torch names of data parallel: meshes joined, strided shards, hooks of other wrappers.

Seen in torch 2.11 to 2.15.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

OTHER_WRAPPERS = (FSDPModule, DistributedDataParallel)


def join(outer: DeviceMesh, inner: DeviceMesh) -> DeviceMesh:
    """A mesh of ``outer``'s dimensions, then ``inner``'s; RuntimeError if they have no common root."""
    return DeviceMesh._concatenate([outer, inner])


def strided_shard(dim: int, split_factor: int) -> _StridedShard:
    """Shard ``dim`` of what an inner mesh dimension has already split into ``split_factor`` parts."""
    return _StridedShard(dim, split_factor=split_factor)
