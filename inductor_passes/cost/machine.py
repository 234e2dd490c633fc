"""Turn work into microseconds on one machine: the one place where that is done.

The scheduler and the simulator ask for the nodes of a graph (``model.py``), the planner for
operations on shards, the fusions for what they would put in a graph: each knows its work in bytes,
operations and payloads, and all get the same answer for the same work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import fx

from inductor_passes.cost.collectives import GroupShape, collective_us, shape_of
from inductor_passes.cost.topology import Product, Topology
from inductor_passes.graph.collectives import HOST_KINDS, argument, blocking_kind, kind, role
from inductor_passes.torch_compat.c10d import world_size
from inductor_passes.torch_compat.nodes import size_hint


class Machine:
    """Times on the devices and links of a topology. All sizes are of one rank, all times in
    microseconds.
    """

    __slots__ = ("topology",)

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    @property
    def kernel_start_us(self) -> float:
        """Microseconds that a kernel takes besides its work."""
        return self.topology.kernel_us

    @property
    def link_bytes_per_us(self) -> float:
        """Rate of one rank to its peers on the same host."""
        return self.topology.intra_gb_per_s * 1e3

    def memory_us(self, moved_bytes: float) -> float:
        """Bytes read and bytes written, inside a kernel that runs anyway."""
        return moved_bytes / self.topology.memory_bytes_per_us

    def kernel_us(
        self,
        moved_bytes: float,
        operations: float = 0.0,
        dtype: str = "float32",
        *,
        attention: bool = False,
        starts: bool = True,
    ) -> float:
        """The longer of memory traffic and arithmetic, and the start of the kernel if one
        ``starts`` here.

        operations: floating-point, multiplications and additions counted apart. dtype: what they
            are done in.
        attention: of a fused attention kernel, which reaches a share of the peak of its own.
        """
        us = self.memory_us(moved_bytes)
        if operations:
            rate = self.topology.matmul_rate(dtype)
            per_us = rate.flops_per_us
            if attention:
                per_us = rate.peak_tflops * self.topology.attention_efficiency * 1e6
            # Roofline: arithmetic and traffic overlap inside a kernel (S. Williams et al.,
            # "Roofline", CACM 52, 2009).
            us = max(operations / per_us, us)
        return us + (self.kernel_start_us if starts else 0.0)

    def host_copy_us(self, copied_bytes: float) -> float:
        """A copy to the host's memory or back."""
        return self.kernel_start_us + copied_bytes / (self.topology.host_gb_per_s * 1e3)

    def product_us(self, dtype: str, shape: Product, moved_bytes: float) -> float:
        """A matrix product, by what was measured of it, or of its dtype, or else as any kernel.

        shape: batch, m, k and n of [m, k] x [k, n]. moved_bytes: of both operands and the result.
        """
        measured = self.topology.measured_product_us(dtype, shape, self.memory_us(moved_bytes))
        if measured is not None:
            return measured
        return self.kernel_us(moved_bytes, 2 * math.prod(shape), dtype)

    def call_us(
        self,
        kind: str,
        payload_bytes: Sequence[float],
        group: GroupShape,
        *,
        one_peer: bool = False,
    ) -> float:
        """Link time of one call: one collective, or several that are coalesced and run one after
        another.

        payload_bytes: this rank's input of each; each but the first may save (a part of) the
        library's start. Raises ValueError for a kind without a formula.
        """
        topology = self.topology
        times = [
            collective_us(kind, payload, group, topology, one_peer=one_peer)
            for payload in payload_bytes
        ]
        start = min(protocol.launch_us for protocol in topology.protocols)
        # A coalesced call is one start of the library, as far as the topology says that it saves
        # the others.
        return sum(times) - start * topology.coalesced_start_share * max(0, len(times) - 1)


def node_us(
    launch: fx.Node,
    machine: Machine,
    shapes: dict[object, GroupShape],
    payload_bytes: Sequence[float],
) -> float:
    """Predict the link time of a launch or of a blocking collective, for the payloads given.

    ``payload_bytes`` holds bytes of this rank's input: one, or one for each launch of a coalesced
    call. They run one after another; each but the first may save (a part of) the library's start.

    ``shapes`` remembers groups by name between calls: a group can have thousands of ranks, and a
    graph thousands of launches on it. Raises ValueError for a node that is no collective.
    """
    name = kind(launch) if role(launch) == "launch" else blocking_kind(launch)
    if not name:
        raise ValueError(f"{launch.format_node()} is no collective, so it has no link time")
    if name in HOST_KINDS:
        return machine.host_copy_us(sum(payload_bytes))
    group = argument(launch, "group_name")
    # The size of the job is in the key: tests and jobs initialise more than one after the other.
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
