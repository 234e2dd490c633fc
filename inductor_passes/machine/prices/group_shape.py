"""Layout of a process group on the nodes of a cluster: the part of a group that sets its speed.

Rank-invariant: derived from size and from the distances between ranks, never from which group of a
mesh dimension this process is in, so all ranks of a homogeneous mesh get one answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.torch_compat.c10d import group_ranks, world_size


@dataclass(frozen=True, slots=True)
class GroupShape:
    """``size`` ranks on ``nodes`` nodes, at most ``ranks_per_node`` of them on one."""

    size: int
    nodes: int

    @property
    def ranks_per_node(self) -> int:
        """Ranks of this group that share a node."""
        return math.ceil(self.size / self.nodes)

    @property
    def crosses_nodes(self) -> bool:
        """Return whether some traffic has to leave a node."""
        return self.nodes > 1


def shape_of_ranks(ranks: Sequence[int], ranks_per_node: int, world: int) -> GroupShape:
    """Place a group's global ranks on nodes of ``ranks_per_node`` consecutive ranks.

    Only distances from the first rank count, as if the first rank were the first of its node. Groups
    of a fixed stride that do not tile a node evenly, in a world of several nodes, straddle a boundary
    somewhere: one of them is slow, and all ranks wait for it, so the shape is that of the slow one.
    """
    offsets = sorted(rank - min(ranks) for rank in ranks)
    size = len(offsets)
    if size < 2 or world <= ranks_per_node:
        return GroupShape(size, 1)
    nodes = len({offset // ranks_per_node for offset in offsets})
    stride = offsets[1]
    regular = all(offset == index * stride for index, offset in enumerate(offsets))
    extent = stride * size
    if nodes == 1 and regular and ranks_per_node % extent != 0:
        nodes = 2
    return GroupShape(size, nodes)


def shape_of(launch: fx.Node, ranks_per_node: int) -> GroupShape:
    """The shape of the group that a collective runs on.

    A group that is registered in this process is looked up. Otherwise its ranks are taken as
    contiguous, its size from the node's ``group_size``, or one full node where the node has none.
    """
    ranks = argument(launch, "ranks")
    if isinstance(ranks, (list, tuple)) and all(isinstance(rank, int) for rank in ranks):
        known: Sequence[int] | None = [rank for rank in ranks if isinstance(rank, int)]
    else:
        known = group_ranks(_group(launch))
    if known:
        return shape_of_ranks(known, ranks_per_node, max(world_size() or 0, max(known) + 1))
    size = argument(launch, "group_size")
    count = size if isinstance(size, int) else ranks_per_node
    return shape_of_ranks(range(count), ranks_per_node, max(world_size() or 0, count))


def _group(launch: fx.Node) -> object:
    """A name, or under compile-on-one-rank the traced value that stands for the group."""
    group = argument(launch, "group_name")
    return group.meta.get("val") if isinstance(group, fx.Node) else group
