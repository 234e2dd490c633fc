"""The interface of cost models, and the one that is used: a roofline for compute, alpha-beta for
links.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx

from inductor_passes.cost.collectives import GroupShape, shape_of_ranks
from inductor_passes.cost.compute import Traffic, flops, graph_traffic, is_attention, product_shape
from inductor_passes.cost.machine import Machine, node_us
from inductor_passes.cost.topology import Topology
from inductor_passes.graph.collectives import payloads, role
from inductor_passes.torch_compat.c10d import common_name, known_groups, world_size

# Key of a node's meta: the predicted time of a fused kernel, which holds communication inside.
PREDICTED_US = "inductor_passes_predicted_us"


@runtime_checkable
class CostModel(Protocol):
    """Predicted durations in microseconds for the nodes of one post-grad graph.

    Every rank of a program must get the same answers, or ranks schedule differently and hang: a
    model may read shapes, dtypes, the topology file, and the size and stride of a group; never this
    process's own rank, a clock or a benchmark. Predictions are made before launches are pinned in
    place.
    """

    @property
    def name(self) -> str:
        """For reports: the topology's name."""

    def compute_us(self, node: fx.Node) -> float:
        """Time on the compute stream; 0.0 for placeholders, views, launches, waits and outputs."""

    def launch_us(self, launch: fx.Node) -> float:
        """Time that one collective holds its channel, from its start until its result is there."""

    def link_us(self, launch: fx.Node, payload_bytes: Sequence[float]) -> float:
        """The same for a launch like this one with other payloads; several are one coalesced
        call.
        """

    @property
    def copy_bytes_per_us(self) -> float:
        """Rate at which buckets are packed and unpacked, over bytes read plus bytes written."""

    @property
    def compute_stretch(self) -> float:
        """Factor on a kernel's time while a collective is on its way; 1.0: none is slowed."""

    def digest(self) -> str:
        """A stable hash of everything that changes a prediction; part of the cache key."""


def launching_us(cost: CostModel) -> float:
    """Processor time that each launch takes of what computes; 0 where a model has no such
    figure.
    """
    return float(cost.launching_us) if isinstance(cost, _PricesLaunching) else 0.0


def host_bytes_per_us(cost: CostModel) -> float:
    """Rate of copies to the host's memory and back; 0 where a model has no such figure."""
    machine = machine_of(cost)
    return 0.0 if machine is None else machine.topology.host_gb_per_s * 1e3


def machine_of(cost: CostModel | None) -> Machine | None:
    """Return the machine that a model prices for; None where it prices from something else."""
    machine = cost.machine if isinstance(cost, _HasMachine) else None
    return machine if isinstance(machine, Machine) else None


# What a third party's model may have beyond ``CostModel``.
@runtime_checkable
class _PricesLaunching(Protocol):
    @property
    def launching_us(self) -> float: ...


@runtime_checkable
class _HasMachine(Protocol):
    @property
    def machine(self) -> object: ...


class TopologyCostModel:
    """Predicts microseconds on one topology. Implements ``CostModel``.

    A compute node takes the longer of its arithmetic and its memory traffic, plus the start of a
    kernel where one starts there (``traffic.py`` says where). A matrix product that the topology
    has measured takes what was measured, and others of its dtype what products of as many
    operations did: so tile and wave effects of small ones are seen where there are measurements,
    and nowhere else. A kernel beside a collective takes as many times as long as the topology says.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.machine = Machine(topology)
        self._seen: _Analysis | None = None
        self._shapes: dict[object, GroupShape] = {}

    @property
    def name(self) -> str:
        """The topology's name."""
        return self.topology.name

    def __reduce__(self) -> tuple[type[TopologyCostModel], tuple[Any, ...]]:
        # Inductor copies and pickles its configuration, which may hold a pass that holds a model;
        # what was analysed belongs to a graph of this process and stays behind.
        return type(self), (self.topology,)

    def __repr__(self) -> str:
        return f"TopologyCostModel({self.name!r}, digest={self.digest()!r})"

    def compute_us(self, node: fx.Node) -> float:
        """Time on the compute stream; 0.0 for placeholders, views, launches, waits and outputs.

        Fusion makes the time of a node depend on its neighbours, so a graph is analysed once and
        again after it has changed around ``node``; the order of its nodes makes no difference.
        """
        if node.op != "call_function" or role(node):
            return 0.0
        if PREDICTED_US in node.meta:
            return float(node.meta[PREDICTED_US])
        if self._seen is None or not self._seen.holds_for(node):
            self._seen = _Analysis(node.graph, self.machine)
        return self._seen.us[node]

    def launch_us(self, launch: fx.Node) -> float:
        """Link time of a launch, or of a collective that blocks the compute stream itself.

        Raises ValueError for any other node.
        """
        return self.link_us(launch, payloads(launch))

    def link_us(self, launch: fx.Node, payload_bytes: Sequence[float]) -> float:
        """Link time of a launch like this one with other payloads; several are one coalesced
        call.
        """
        return node_us(launch, self.machine, self._shapes, payload_bytes)

    @property
    def copy_bytes_per_us(self) -> float:
        """Rate at which buckets are packed, over bytes read plus bytes written."""
        return self.topology.memory_bytes_per_us

    @property
    def compute_stretch(self) -> float:
        """Factor on a kernel's time while a collective is on its way."""
        return self.topology.compute_stretch

    @property
    def launching_us(self) -> float:
        """Processor time that a launch takes of what computes."""
        return self.topology.launching_us

    def digest(self) -> str:
        return digest_of(self.topology)


def digest_of(topology: Topology) -> str:
    """Hash of the figures, the size of the job and the shape of every group that it has made.

    Groups are part of it because a graph names a group and not its ranks: without them a warm
    cache could bring one rank a schedule for other groups than its peers have. They stand there by
    the names that all ranks have for them.
    """
    figures = dataclasses.asdict(topology)
    del figures["sources"]
    world = world_size() or 0
    groups = {
        common_name(name): dataclasses.astuple(
            shape_of_ranks(ranks, topology.ranks_per_node, world)
        )
        for name, ranks in known_groups().items()
    }
    text = json.dumps([figures, world, groups], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Analysis:
    """Times of one graph's nodes, as long as the graph stays as it was."""

    def __init__(self, graph: fx.Graph, machine: Machine) -> None:
        self._graph = graph
        self._length = len(graph.nodes)
        self._args: dict[fx.Node, object] = {}
        self._users: dict[fx.Node, int] = {}
        self.us: dict[fx.Node, float] = {}
        for node, traffic in graph_traffic(graph).items():
            self._args[node] = node.args
            self._users[node] = len(node.users)
            busy = traffic.starts_kernel or traffic.read_bytes
            self.us[node] = _compute_us(node, traffic, machine) if busy else 0.0

    def holds_for(self, node: fx.Node) -> bool:
        # Not a proof that nothing has changed, but cheap; a change far away moves the estimate
        # little.
        if self._graph is not node.graph or self._length != len(self._graph.nodes):
            return False
        return self._args.get(node) is node.args and self._users[node] == len(node.users)


def _compute_us(node: fx.Node, traffic: Traffic, machine: Machine) -> float:
    moved = traffic.read_bytes + traffic.write_bytes
    operations = 0.0 if node.op != "call_function" else flops(node)
    shape = product_shape(node) if operations else None
    if shape is not None:
        return machine.product_us(dtype_name(node), shape, moved)
    return machine.kernel_us(
        moved,
        operations,
        dtype_name(node) if operations else "",
        attention=is_attention(node),
        starts=traffic.starts_kernel,
    )


def dtype_name(node: fx.Node) -> str:
    """The type that a product is computed in: that of its first tensor."""
    for source in node.all_input_nodes:
        value = source.meta.get("val")
        if isinstance(value, torch.Tensor):
            return str(value.dtype).removeprefix("torch.")
    return "float32"
