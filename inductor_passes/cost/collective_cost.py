"""From a collective's node to the numbers that its formula needs."""

from __future__ import annotations

import torch
from torch import fx

from inductor_passes._torch import size_hint
from inductor_passes.collectives import argument, is_launch, kind, payload_bytes
from inductor_passes.cost.alpha_beta import collective_us
from inductor_passes.cost.group_shape import shape_of
from inductor_passes.cost.topology import Topology

# Collectives that return only when they are done: no wait follows, the compute stream stands still.
_BLOCKING_KINDS = {"_dtensor::shard_dim_alltoall": "all_to_all"}


def blocking_kind(node: fx.Node) -> str:
    """Kind of a collective that has no ``wait_tensor`` of its own; "" for every other node."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return ""
    return _BLOCKING_KINDS.get(node.target._schema.name, "")


def node_us(launch: fx.Node, topology: Topology) -> float:
    """Predict the link time of a launch or of a blocking collective.

    Raises ValueError for any other node: a caller that asks has mistaken its node.
    """
    name = kind(launch) if is_launch(launch) else blocking_kind(launch)
    if not name:
        raise ValueError(f"{launch.format_node()} is no collective, so it has no link time")
    group = shape_of(launch, topology.ranks_per_node)
    payload = payload_bytes(launch)
    return collective_us(name, payload, group, topology, one_peer=_has_one_peer(launch))


def _has_one_peer(launch: fx.Node) -> bool:
    """Whether an all_to_all is a permutation: it sends to exactly one rank.

    Every rank of a permutation sends to one peer, so every rank comes to the same answer.
    """
    splits = argument(launch, "input_split_sizes")
    if not isinstance(splits, (list, tuple)):
        return False
    sizes = []
    for split in splits:
        value = split.meta.get("val") if isinstance(split, fx.Node) else split
        if not isinstance(value, (int, torch.SymInt)):
            return False
        sizes.append(size_hint(value))
    return sum(size > 0 for size in sizes) == 1 and len(sizes) > 1
