"""Reduce-scatter a sum if each rank keeps only its own chunk of it.

Rank 0 cannot see from its graph whether all ranks take their own chunk or all take the first one,
and ranks that decide differently hang. So a slice counts only if DTensor made it while it
redistributed from Replicate to Shard. Dynamo records the function that each node comes from, and
DTensor slices inside functions that do not slice themselves.

DTensor slices along one dimension of the mesh. This rank can be sure that it is the dimension of
``group_name`` only if it knows no other group of that size. A mesh gives that knowledge to all
ranks of a group equally. Where two mesh dimensions have the same size, nothing is recognised.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx

from inductor_passes.graph.collectives import (
    group_name,
    group_size,
    launches,
    payload_bytes,
    reduce_op,
    waits_of,
)
from inductor_passes.graph.edit import aten, emit, erase_unused, replace, static_shape
from inductor_passes.graph_pass import Numerics, PassStats, Rewrite
from inductor_passes.rewrite.inner_dimensions import cut_first
from inductor_passes.torch_compat.c10d import group_ranks, known_groups
from inductor_passes.torch_compat.nodes import function_name

# Functions and methods in which a plain tensor is never sliced; a DTensor's are redistributed.
_NOT_SLICING = frozenset(
    "redistribute prim_redistribute distribute_tensor linear matmul mm bmm addmm baddbmm add iadd "
    "sub mul imul truediv div embedding layer_norm rms_norm softmax silu gelu relu dropout "
    "where".split()
)


@dataclass(frozen=True, slots=True)
class OwnChunk:
    """``node`` holds the chunk of this rank, cut along ``dim``; ``shape`` is the whole's."""

    node: fx.Node
    dim: int
    shape: tuple[int, ...]


def own_chunks(whole: fx.Node, launch: fx.Node) -> list[OwnChunk] | None:
    """Every use of ``whole`` as this rank's own chunk by ``launch``'s group; None if there is
    another use.

    Chunks are equal: sizes that the group does not divide are not recognised, on any rank.
    """
    count, position = group_size(launch), group_position(group_name(launch))
    shape = static_shape(whole)
    if position is None or shape is None or count < 2 or not whole.users:
        return None
    found = []
    # One other use needs the whole sum: then the all_reduce has to stay, and a second collective
    # would only add bytes.
    for user in whole.users:
        dim = _split_dim(user, shape, count)
        # A user's own slice may be the first chunk on every rank, which looks the same on rank 0.
        if dim is None or not _is_of_dtensor(user):
            return None
        pieces = [piece for piece in user.users if piece.users]
        if len(pieces) != 1 or pieces[0].target is not operator.getitem:
            return None
        if pieces[0].args[1] != position:
            return None
        found.append(OwnChunk(pieces[0], dim, shape))
    return found


def erase_chunks(graph: fx.Graph, chunks: Sequence[OwnChunk]) -> None:
    """Erase chunks that nobody reads any more, and the cuts that made them."""
    cuts = [cut for cut in (chunk.node.args[0] for chunk in chunks) if isinstance(cut, fx.Node)]
    erase_unused(graph, [piece for cut in cuts for piece in cut.users])


def group_position(name: str) -> int | None:
    """This rank's place in the group, if no other group of that size is known; else None."""
    ranks = group_ranks(name)
    if ranks is None or dist.get_rank() not in ranks:
        return None
    # With two mesh dimensions of one size, a chunk of one looks like a chunk of the other.
    same_size = {members for members in known_groups().values() if len(members) == len(ranks)}
    return ranks.index(dist.get_rank()) if same_size <= {ranks} else None


def asks_for_position(graph: fx.Graph) -> bool:
    """Return whether a pass may ask where in a group this rank stands."""
    return any(node.target is aten.split.Tensor and _is_of_dtensor(node) for node in graph.nodes)


def _split_dim(node: fx.Node, shape: tuple[int, ...], count: int) -> int | None:
    """The dimension along which ``node`` cuts ``shape`` in ``count`` equal parts."""
    if node.target is not aten.split.Tensor:
        return None
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    if not isinstance(dim, int):
        return None
    dim %= len(shape)
    # DTensor pads uneven shards on some ranks only, and their decisions could differ.
    return dim if shape[dim] % count == 0 and node.args[1] == shape[dim] // count else None


def _is_of_dtensor(node: fx.Node) -> bool:
    # Backward nodes bear the stack of the forward node that they belong to.
    stack = node.meta.get("source_fn_stack") or node.meta.get("fwd_source_fn_stack")
    if not stack:
        return False
    return function_name(stack[-1][1]).strip("_") in _NOT_SLICING


c10d = torch.ops._c10d_functional


class AllReduceSlice(Rewrite):
    """Turn an all_reduce, then this rank's chunk, into a reduce_scatter: half the bytes to send.

    Partial to Replicate to Shard, as two redistributes. ``own_chunks`` says
    what counts as own.

    Requires: a functional graph; static shapes that the group divides.
    Ensures:  the same sums, perhaps in another order; a second run changes nothing.
    Stats:    ``all_reduces_replaced``, ``bytes_saved`` (on the link, of a ring, by this rank).
    """

    name = "all_reduce_slice"
    numerics = Numerics.REASSOCIATING

    def run(self, graph: fx.Graph) -> PassStats:
        count = saved = 0
        for launch in launches(graph):
            waits = waits_of(launch)
            if launch.target is not c10d.all_reduce.default or len(waits) != 1:
                continue
            chunks = own_chunks(waits[0], launch)
            if chunks is None or len({chunk.dim for chunk in chunks}) != 1:
                continue
            dim, ranks = chunks[0].dim, group_size(launch)
            saved += payload_bytes(launch) * (ranks - 1) // ranks
            operation, group = reduce_op(launch), group_name(launch)
            with graph.inserting_before(launch):
                whole = launch.args[0]
                assert isinstance(whole, fx.Node)
                source = cut_first(graph, whole, dim, ranks, launch)
                args = (source, operation, ranks, launch.args[2])
                scattered = emit(graph, c10d.reduce_scatter_tensor.default, args, launch)
            assert group == group_name(scattered)
            with graph.inserting_before(waits[0]):
                arrived = emit(graph, c10d.wait_tensor.default, (scattered,), waits[0])
            for chunk in chunks:
                replace(chunk.node, arrived, self.name)
            erase_chunks(graph, chunks)
            graph.erase_node(waits[0])
            graph.erase_node(launch)
            count += 1
        return PassStats(count > 0, {"all_reduces_replaced": count, "bytes_saved": saved})
