"""Predict the time of a collective on its links: alpha per step, beta per byte, the best of a few
algorithms.

The form is that of NCCL's own tuning model (``src/graph/tuning.cc``): for each protocol a start, a
cost per hop and a share of the link's rate; the library takes the protocol and algorithm that is
fastest for the message, so the prediction is the minimum. Notation: n ranks on k nodes, S bytes of
payload, which is this rank's input; rates are per rank and direction.

Rank-invariant: derived from size and from the distances between ranks, never from which group of a
mesh dimension this process is in, so all ranks of a homogeneous mesh get one answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from inductor_passes.cost.topology import LinkProtocol, Topology
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

    Only distances from the first rank count, as if the first rank were the first of its node.
    Groups of a fixed stride that do not tile a node evenly, in a world of several nodes, straddle a
    boundary somewhere: one of them is slow, and all ranks wait for it, so the shape is that of the
    slow one.
    """
    # Distances, not ranks: a group of rank 8 to 15 and one of 0 to 7 have one shape, whichever this
    # process is in.
    offsets = sorted(rank - min(ranks) for rank in ranks)
    size = len(offsets)
    if size < 2 or world <= ranks_per_node:
        return GroupShape(size, 1)
    nodes = len({offset // ranks_per_node for offset in offsets})
    stride = offsets[1]
    regular = all(offset == index * stride for index, offset in enumerate(offsets))
    extent = stride * size
    # Groups of six on nodes of eight: some lie on one node and some on two, and all of the job wait
    # for the slow ones.
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


@dataclass(frozen=True, slots=True)
class _Plan:
    """Hops within and between nodes on the longest path, and bytes through each kind of link."""

    intra_steps: float
    inter_steps: float
    intra_bytes: float
    inter_bytes: float


def collective_us(
    kind: str,
    payload_bytes: float,
    group: GroupShape,
    topology: Topology,
    *,
    one_peer: bool = False,
) -> float:
    """Predict one collective. ``kind`` as in ``collectives.kind``; payload is this rank's input.

    ``one_peer`` marks an all_to_all that sends everything to one rank: a permutation. A group of
    one rank costs the start alone. What the topology has measured counts instead of the formulas.
    Raises ValueError for a kind without a formula.
    """
    kind = "permute" if one_peer else kind
    start = min(protocol.launch_us for protocol in topology.protocols)
    if group.size < 2:
        return start
    measured = topology.measured_collective(kind, group.size, group.nodes)
    # Measured times have the library's choice of algorithm in them, and its start.
    if measured is not None:
        return measured.us(payload_bytes)
    plans = _plans(kind, payload_bytes, group, topology.reduce_scatter_rounds)
    times = [_us(plan, p, group, topology) for plan in plans for p in topology.protocols]
    own = topology.all_reduce_in_node
    if kind == "all_reduce" and own is not None and not group.crosses_nodes:
        times.append(own.launch_us + payload_bytes / (own.gb_per_s * 1e3))
    return min(times)


def _plans(
    kind: str, payload: float, group: GroupShape, reduce_scatter_rounds: float
) -> list[_Plan]:
    n, k = group.size, group.nodes
    if kind == "all_gather" or kind == "gather":
        # Ring: each rank sends n - 1 shards on, S bytes each.
        return [_ring(1, (n - 1) * payload, group)]
    if kind == "reduce_scatter" or kind == "scatter":
        rounds = reduce_scatter_rounds if kind == "reduce_scatter" else 1.0
        # Ring: n - 1 steps with a share of S / n bytes each.
        return [_ring(rounds, rounds * (n - 1) / n * payload, group)]
    if kind in ("all_reduce", "barrier", "monitored_barrier"):  # a barrier has no payload
        # A reduce-scatter and an all-gather of the result: 2 (n - 1) / n of S, the least that any
        # algorithm moves through a rank.
        traffic = 2 * (n - 1) / n * payload
        plans = [_ring(2, traffic, group)]
        if k > 1:
            # A double tree between nodes over a chain in each: log2(k) network hops, not k - 1.
            hops = 2 * (group.ranks_per_node - 1), 2 * math.ceil(math.log2(k))
            plans.append(_Plan(*hops, traffic, traffic / group.ranks_per_node))
        return plans
    if kind == "broadcast" or kind == "reduce":
        # Trees: log2 hops in a node and between nodes, and each byte passes once.
        hops = math.ceil(math.log2(group.ranks_per_node)), math.ceil(math.log2(k))
        return [_Plan(*hops, payload, payload / group.ranks_per_node)]
    if kind == "all_to_all":
        # Every pair at once; each rank has its own network link, which others cannot help with.
        local = group.ranks_per_node - 1
        outside = n - 1 - local
        # S / n bytes to each rank: those of the own node through its switch, the others through
        # this rank's network link.
        return [_Plan(1, min(1, outside), local / n * payload, outside / n * payload)]
    if kind in ("permute", "send", "recv", "isend", "irecv", "batch_p2p"):
        return [_Plan(0, 1, 0.0, payload) if k > 1 else _Plan(1, 0, payload, 0.0)]
    raise ValueError(f"no cost formula for collectives of kind {kind!r}")


def _ring(rounds: float, traffic: float, group: GroupShape) -> _Plan:
    """``rounds`` times around a ring. Its network hop is carried by all links of a node
    together.
    """
    # The ring enters each node once: k - 1 of its n - 1 hops cross the network.
    inter_steps = rounds * (group.nodes - 1)
    intra_steps = rounds * (group.size - 1) - inter_steps
    return _Plan(intra_steps, inter_steps, traffic, traffic / group.ranks_per_node)


def _us(plan: _Plan, protocol: LinkProtocol, group: GroupShape, topology: Topology) -> float:
    steps = plan.intra_steps * protocol.intra_step_us + plan.inter_steps * protocol.inter_step_us
    transfer = 0.0
    if group.ranks_per_node > 1:
        transfer = plan.intra_bytes / (topology.intra_gb_per_s * 1e3 * protocol.intra_share)
    if group.crosses_nodes:
        inter = plan.inter_bytes / (topology.inter_gb_per_s * 1e3 * protocol.inter_share)
        # Both kinds of link carry the ring at once: the slower one sets its pace.
        transfer = max(transfer, inter)
    return protocol.launch_us + steps + transfer
