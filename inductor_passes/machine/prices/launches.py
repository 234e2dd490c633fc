"""From a collective's node to the numbers that its formula needs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from inductor_passes.graph.collectives import argument, blocking_kind, kind, role
from inductor_passes.machine.prices.group_shape import GroupShape, shape_of
from inductor_passes.machine.prices.machine import Machine
from inductor_passes.torch_compat.c10d import world_size
from inductor_passes.torch_compat.sizes import size_hint


def node_us(
    launch: fx.Node,
    machine: Machine,
    shapes: dict[object, GroupShape],
    payload_bytes: Sequence[float],
) -> float:
    """Predict the link time of a launch or of a blocking collective, for the payloads given.

    ``payload_bytes`` holds bytes of this rank's input: one, or one for each launch of a coalesced call.
    They run one after another; each but the first may save (a part of) the library's start.

    ``shapes`` remembers groups by name between calls: a group can have thousands of ranks, and a graph
    thousands of launches on it. Raises ValueError for a node that is no collective.
    """
    name = kind(launch) if role(launch) == "launch" else blocking_kind(launch)
    if not name:
        raise ValueError(f"{launch.format_node()} is no collective, so it has no link time")
    group = argument(launch, "group_name")
    key = (group, argument(launch, "group_size"), world_size())
    shape = shapes.get(key) if isinstance(group, str) else None
    if shape is None:
        shape = shape_of(launch, machine.topology.ranks_per_node)
        if isinstance(group, str):
            shapes[key] = shape
    return machine.call_us(name, payload_bytes, shape, one_peer=has_one_peer(launch))


def has_one_peer(launch: fx.Node) -> bool:
    """Return whether an all_to_all is a permutation: it sends to exactly one rank.

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
