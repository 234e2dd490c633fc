"""Passes that replace a launch, its wait and what reads it by one kernel."""

from inductor_passes.fused.fuse_all_gather_matmul import FuseAllGatherMatmul
from inductor_passes.fused.fuse_all_reduce_norm import FuseAllReduceNorm
from inductor_passes.fused.fuse_matmul_reduce_scatter import FuseMatmulReduceScatter

FUSIONS = (FuseAllGatherMatmul, FuseMatmulReduceScatter, FuseAllReduceNorm)
