"""Small shards that a graph has from the start are gathered together, as FSDP2 gathers those of a module."""

from __future__ import annotations

import torch
from torch import fx

from inductor_passes.base import Numerics
from inductor_passes.graph.collectives import launches, output_bytes, waits_of
from inductor_passes.graph.edit import CAST, PLACING, aten, chain_above, static_shape, tensor
from inductor_passes.rewrite.merge_tiny import Merging

c10d = torch.ops._c10d_functional
# In a node's ``custom`` metadata: the name of what is gathered together with it.
GATHERED_FOR = "gathered_for"
_FROM_INPUT = PLACING | {CAST, aten.constant_pad_nd.default}


class BucketGathers(Merging):
    """All-gathers of inputs that are marked for one module are one, up to ``held_bytes`` of what they gather.

    A start takes time of the processor that no topology knows, and FSDP2 itself has one for a module. What is gathered
    stays in memory until the last of the bucket has been read, as with FSDP2. Shards that are large by themselves stay
    alone, and the scheduler decides about them.

    Requires: a functional graph; static shapes.
    Ensures:  the same values, to the bit; a second run changes nothing.
    Stats:    ``launches_before``, ``launches_after`` (of those merged).
    """

    name = "bucket_gathers"
    shows_in_plan = True
    numerics = Numerics.BITWISE
    keeps_launch_order = False

    def __init__(self, held_bytes: int = 4 << 20) -> None:
        self.held_bytes = held_bytes

    def digest(self) -> str:
        return f"{self.held_bytes}"

    def buckets(self, graph: fx.Graph) -> list[list[fx.Node]]:
        found: list[list[fx.Node]] = []
        open_buckets: dict[object, list[fx.Node]] = {}
        for launch in launches(graph):
            value = tensor(launch.args[0]) if _gathers_input(launch) else None
            if value is None:
                continue
            marked = launch.meta["custom"][GATHERED_FOR]
            key = (marked, str(launch.args[1:]), value.dtype, value.device)
            bucket = open_buckets.get(key)
            held = sum(map(output_bytes, bucket or ())) + output_bytes(launch)
            if bucket is None or held > self.held_bytes:
                bucket = open_buckets[key] = []
                found.append(bucket)
            bucket.append(launch)
        return found


def _gathers_input(launch: fx.Node) -> bool:
    return (
        launch.target is c10d.all_gather_into_tensor.default
        and GATHERED_FOR in (launch.meta.get("custom") or {})
        and len(waits_of(launch)) == 1
        and bool(static_shape(launch.args[0]))
        and output_bytes(launch) > 0
        and chain_above(launch.args[0], _FROM_INPUT)[-1].op == "placeholder"
    )
