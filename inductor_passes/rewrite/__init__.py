"""Passes that make collectives fewer or smaller without changing what a program means."""

from inductor_passes.rewrite.all_reduce_slice import AllReduceSlice as AllReduceSlice
from inductor_passes.rewrite.bucket import BucketAverages as BucketAverages
from inductor_passes.rewrite.bucket import BucketGathers as BucketGathers
from inductor_passes.rewrite.compose_redistributes import (
    ComposeRedistributes as ComposeRedistributes,
)
from inductor_passes.rewrite.inner_dimensions import GatherWithoutCopy as GatherWithoutCopy
from inductor_passes.rewrite.inner_dimensions import ScatterByExchange as ScatterByExchange
from inductor_passes.rewrite.merge_tiny import MergeTiny as MergeTiny
from inductor_passes.rewrite.narrow_gathers import DowncastBeforeGather as DowncastBeforeGather
from inductor_passes.rewrite.narrow_gathers import GatherBeforeUpcast as GatherBeforeUpcast
from inductor_passes.rewrite.reduce_sums import ReduceSums as ReduceSums
from inductor_passes.rewrite.share_collectives import ShareLaunches as ShareLaunches

# Read top to bottom: what takes a launch away comes before what makes one smaller.
REWRITES = (
    ComposeRedistributes,
    ReduceSums,
    AllReduceSlice,
    GatherBeforeUpcast,
    DowncastBeforeGather,
    ShareLaunches,
    GatherWithoutCopy,
    BucketAverages,
    BucketGathers,
    MergeTiny,
    ScatterByExchange,
)
