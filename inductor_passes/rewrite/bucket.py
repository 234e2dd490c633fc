"""Bucket FSDP2's small gathers and DDP's averages as their own runtimes do."""

from __future__ import annotations

import operator

import torch
from torch import fx

from inductor_passes.graph.aliasing import alias_source
from inductor_passes.graph.collectives import launches, output_bytes, payload_bytes, waits_of
from inductor_passes.graph.edit import CAST, PLACING, aten, chain_above, static_shape, tensor
from inductor_passes.graph.phases import computes_again, phase_of, stage_of
from inductor_passes.graph_pass import Numerics
from inductor_passes.rewrite.merge_tiny import FROM_INPUT, Merging

c10d = torch.ops._c10d_functional
# In a node's ``custom`` metadata: the name of what is gathered together with it.
GATHERED_FOR = "gathered_for"


class BucketGathers(Merging):
    """Merge all-gathers of the parameters of one module, up to 4 MiB (``held_bytes``) each.

    A start takes time of the processor that no topology knows, and FSDP2 itself has one for a
    module. What is gathered stays in memory until the last of the bucket has been read, as with
    FSDP2. Shards that are large by themselves stay alone, and the scheduler decides about them.

    Requires: a functional graph; static shapes.
    Ensures:  the same values, to the bit; a second run changes nothing.
    Stats:    ``launches_before``, ``launches_after`` (of those merged).
    """

    name = "bucket_gathers"
    numerics = Numerics.BITWISE

    def __init__(self, held_bytes: int = 4 << 20) -> None:
        self.held_bytes = held_bytes

    def digest(self) -> str:
        return f"{self.held_bytes}"

    def buckets(self, graph: fx.Graph) -> list[list[fx.Node]]:
        found: list[list[fx.Node]] = []
        open_buckets: dict[object, list[fx.Node]] = {}
        gathers = [launch for launch in launches(graph) if _gathers_input(launch)]
        partly_kept = {_gathered_for(launch) for launch in gathers if computes_again(launch)}
        for launch in gathers:
            marked, value = _gathered_for(launch), tensor(launch.args[0])
            assert value is not None
            # Group and size stand in the arguments. As text, because an argument may be a node, and
            # in one graph its name is unique. What a backward gathers again is not kept for it, and
            # would be in one bucket with what is kept.
            kind = (str(launch.args[1:]), value.dtype, value.device)
            last_read = _last_read(launch) if marked in partly_kept else None
            key = (marked, phase_of([launch]), last_read, *kind)
            bucket = open_buckets.get(key)
            # By what is gathered, not by the shard: that is what stays in memory until the bucket's
            # last reader.
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
        and chain_above(launch.args[0], FROM_INPUT)[-1].op == "placeholder"
    )


def _gathered_for(launch: fx.Node) -> object:
    return launch.meta["custom"][GATHERED_FOR]


def _last_read(launch: fx.Node) -> int | None:
    """Return the phase in which the memory of a launch's result is read last."""
    shared = [launch]
    for node in shared:
        shared += [user for user in node.users if alias_source(user) is node]
    return phase_of(user for node in shared for user in node.users)


MIB = 1 << 20
_PLACING = PLACING | {operator.getitem, aten.slice.Tensor, aten.copy_.default}


class BucketAverages(Merging):
    """Merge all-reduces of gradients, and their reduce-scatters by module, up to 25 MiB each.

    Gradients are what a graph only returns, or what the update of a training step reads, such as
    the norm that clips; elementwise operators on the way do not matter. Buckets are
    DistributedDataParallel's: filled in the order in which the program launches, the first of
    1 MiB, so that it leaves early. FSDP2 has one launch for a module. A topology by which a start
    costs little changes nothing: a start takes time of the processor that no topology knows, and
    nobody waits for a gradient before the others. The scheduler may merge buckets further.

    Requires: a functional graph; static shapes.
    Ensures:  the same values; a sum may be added in another order, because a ring cuts the payload
              elsewhere; a second run changes nothing.
    Stats:    ``launches_before``, ``launches_after`` (of those merged).
    """

    name = "bucket_averages"
    numerics = Numerics.REASSOCIATING

    def __init__(self, first_bytes: int = MIB, bucket_bytes: int = 25 * MIB) -> None:
        self.first_bytes = first_bytes
        self.bucket_bytes = bucket_bytes

    def digest(self) -> str:
        return f"{self.first_bytes} {self.bucket_bytes}"

    def buckets(self, graph: fx.Graph) -> list[list[fx.Node]]:
        found: list[list[fx.Node]] = []
        open_buckets: dict[object, list[fx.Node]] = {}
        caps: dict[object, int] = {}
        returned = _only_returned(graph)
        # Averages over shards may go on to one over copies.
        summed = _only_returned(graph, through=(c10d.all_reduce.default, c10d.wait_tensor.default))
        for launch in launches(graph):
            ends = summed if launch.target is c10d.reduce_scatter_tensor.default else returned
            if not _is_average(launch) or waits_of(launch)[0] not in ends:
                continue
            value = tensor(launch.args[0])
            assert value is not None
            marked = (launch.meta.get("custom") or {}).get(GATHERED_FOR)
            if marked is None and launch.target is c10d.reduce_scatter_tensor.default:
                continue  # whole gradients would wait for one another in memory
            kind = (launch.target, str(launch.args[1:]), value.dtype, value.device)
            key = (marked, phase_of([launch]), *kind)
            bucket = open_buckets.setdefault(key, [])
            if not bucket:
                found.append(bucket)
            bucket.append(launch)
            first = self.first_bytes if marked is None else self.bucket_bytes
            # DDP closes a bucket once it is full, not before it would overflow: the same here, so
            # that buckets have its sizes.
            if sum(map(payload_bytes, bucket)) >= caps.get(key, first):
                caps[key] = self.bucket_bytes
                del open_buckets[key]
        return found


def _is_average(launch: fx.Node) -> bool:
    return (
        launch.target in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default)
        and len(waits_of(launch)) == 1
        and bool(static_shape(launch.args[0]))
        and payload_bytes(launch) > 0
    )


def _only_returned(graph: fx.Graph, through: tuple[object, ...] = ()) -> set[fx.Node]:
    """Nodes whose values reach nothing but results of the graph, or the update of a training step,
    by elementwise operators, views and ``through``.
    """
    found: set[fx.Node] = set()
    # Backwards: all users of a node have been decided before it.
    for node in reversed(graph.nodes):
        if all(
            user.op == "output"
            or (stage_of(user) == "update" and stage_of(node) != "update")
            or (user in found and (_is_elementwise(user) or user.target in through))
            for user in node.users
        ):
            found.add(node)
    return found


def _is_elementwise(node: fx.Node) -> bool:
    if node.target in _PLACING or node.target is CAST:
        return True
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
