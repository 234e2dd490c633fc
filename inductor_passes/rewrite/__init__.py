"""Passes that make collectives fewer or smaller without changing what a program means."""

from inductor_passes.rewrite.all_reduce_slice import AllReduceSlice as AllReduceSlice
from inductor_passes.rewrite.bucket_averages import BucketAverages as BucketAverages
from inductor_passes.rewrite.bucket_gathers import BucketGathers as BucketGathers
from inductor_passes.rewrite.compose_redistributes import (
    ComposeRedistributes as ComposeRedistributes,
)
from inductor_passes.rewrite.downcast_before_gather import (
    DowncastBeforeGather as DowncastBeforeGather,
)
from inductor_passes.rewrite.gather_before_upcast import GatherBeforeUpcast as GatherBeforeUpcast
from inductor_passes.rewrite.gather_without_copy import GatherWithoutCopy as GatherWithoutCopy
from inductor_passes.rewrite.merge_tiny import MergeTiny as MergeTiny
from inductor_passes.rewrite.scatter_by_exchange import (
    ScatterByExchange as ScatterByExchange,
)
from inductor_passes.rewrite.share_launches import ShareLaunches as ShareLaunches

# Read top to bottom: what takes a launch away comes before what makes one smaller.
REWRITES = (
    ComposeRedistributes,
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
