"""Steps that fusions share: find a collective and its consumers, ask whether a kernel can run and
pays, rewrite.

The figures of a machine, and a few of the kernels' own, fitted to what one H100 measured
(``tools/bench/results/gpu.json``), without what a link between GPUs adds. All times in
microseconds, sizes local to one rank.
"""

from __future__ import annotations

import abc
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.cost.machine import Machine
from inductor_passes.cost.model import PREDICTED_US
from inductor_passes.fused.kernels import availability, register_operators
from inductor_passes.graph.aliasing import op_facts
from inductor_passes.graph.collectives import (
    argument,
    group_name,
    group_size,
    input_tensors,
    is_wait,
    kind,
    launches,
    waits_of,
)
from inductor_passes.graph.edit import CAST, erase_unused, static_shape
from inductor_passes.graph.invariants import check_functional
from inductor_passes.graph.printing import user_line
from inductor_passes.graph_pass import GraphPass, Numerics, PassContext, PassStats
from inductor_passes.simulate import simulate
from inductor_passes.torch_compat.inductor import is_aot_inductor

# The share of cuBLAS's rate that tiles by descriptors reach: 0.92 to 0.97 from the shortest to the
# longest product.
PRODUCT_SHARE = 0.95
# Bytes a microsecond that 16 programs copy beside a product, whatever the link: alone they copy
# 527,000.
COPIED_BESIDE_PRODUCT = 320e3
# What copies cost the product beside them: memory, as a share of the time of their bytes at 450
# GB/s, and 16 of 132 multiprocessors until they are done.
MEMORY_COST = 0.22
BYTES_OF_COST = 450e3
COPIERS_SHARE = 16 / 132
# Between two tiles that are pushed: storing one, and no product beside it.
PUSH_US = 2.6
TILE_BYTES = 128 * 256 * 2
MULTIPROCESSORS = 132
# Assumed, for no link between GPUs was there to measure: the share of its rate that copies by
# kernels reach.
COPY_SHARE = 0.9
# A barrier of all ranks in one memory, with what a launch has besides; a link adds its latency.
SIGNAL_US = 4.0
LEAST_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class Prediction:
    """Time of the launch that is exposed and of its consumers, and of the kernel in their place."""

    unfused_us: float
    fused_us: float

    @property
    def gain(self) -> float:
        """Share of the unfused time that is saved; negative for a loss."""
        return 1 - self.fused_us / self.unfused_us if self.unfused_us > 0 else 0.0

    @property
    def pays(self) -> bool:
        """Return whether it saves enough to be worth the change."""
        return self.gain >= LEAST_GAIN


def all_gather_matmul_us(
    machine: Machine, payload_bytes: float, world: int, matmul_us: float, copied_bytes: float
) -> float:
    """Rows come in over the link while the tiles of those before them are multiplied.

    ``payload_bytes`` is one rank's rows, ``matmul_us`` the unfused products, ``copied_bytes`` what
    is read and written for the gathered rows where somebody else wants them.
    """
    sent = (world - 1) * payload_bytes
    # On a fast link the copying programs are the bottleneck: they share memory and multiprocessors
    # with the product.
    link_us = sent / min(_link_rate(machine), COPIED_BESIDE_PRODUCT)
    compute_us = (
        matmul_us / PRODUCT_SHARE + MEMORY_COST * sent / BYTES_OF_COST + COPIERS_SHARE * link_us
    )
    # Where the link is longer, the last rank's rows are multiplied behind it.
    done = max(compute_us, link_us + matmul_us / PRODUCT_SHARE / world) + SIGNAL_US
    copy_us = machine.memory_us(copied_bytes)
    return (
        machine.kernel_start_us
        + done
        + (copy_us + machine.kernel_start_us if copied_bytes else 0.0)
    )


def matmul_reduce_scatter_us(
    machine: Machine, result_bytes: float, world: int, matmul_us: float
) -> float:
    """Tiles travel while later ones are computed; then ``world`` parts of ``result_bytes`` are
    added.
    """
    # Whole waves: a product of one tile more than fits takes as long as one of a whole wave more.
    waves = math.ceil(world * result_bytes / TILE_BYTES / MULTIPROCESSORS)
    compute_us = matmul_us / PRODUCT_SHARE + PUSH_US * waves
    # The link can start after the first wave.
    sent_us = compute_us / waves + (world - 1) * result_bytes / _link_rate(machine)
    # Reads ``world`` parts and writes one.
    added_us = machine.memory_us((world + 1) * result_bytes)
    return max(compute_us, sent_us) + SIGNAL_US + added_us + 2 * machine.kernel_start_us


def all_reduce_norm_us(
    machine: Machine, payload_bytes: float, world: int, *, two_shot: bool, streams: int
) -> float:
    """One kernel; ``streams`` counts tensors of ``payload_bytes`` that the norm itself reads and
    writes.
    """
    rounds = 2 if two_shot else 1
    # Two-shot reads a share of the rows of all ranks, and then the sums of the others: 2 / n of
    # what one-shot reads.
    share = 2 / world if two_shot else 1.0
    link_us = share * (world - 1) * payload_bytes / _link_rate(machine)
    memory_us = machine.memory_us((2 * rounds + streams) * payload_bytes)
    return machine.kernel_start_us + rounds * SIGNAL_US + link_us + memory_us


def _link_rate(machine: Machine) -> float:
    """Bytes a microsecond, of one rank to its peers on the same host."""
    return machine.link_bytes_per_us * COPY_SHARE


log = logging.getLogger(__name__)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class Match(abc.ABC):
    """A launch, its one wait and the consumers that one kernel can replace."""

    @abc.abstractmethod
    def predict(self, machine: Machine, cost: CostModel, exposed_us: float) -> Prediction:
        """Times with and without the kernel; ``exposed_us`` is what the scheduled graph does not
        hide.
        """

    @abc.abstractmethod
    def apply(self, graph: fx.Graph) -> fx.Node:
        """Put the kernel in place; returns its node."""


class Fusion(GraphPass):
    """Replace a launch, its wait and what reads it by one kernel that waits inside, where that
    pays.

    Taken only where the kernel can run on the group, shapes are static and the cost model predicts
    at least 5 % over the scheduled graph: a launch that other compute hides is left alone. Sums are
    made in another order, so ``exact=True`` leaves these passes out. Decides by graph, topology and
    installation, which all ranks share.

    Requires: a functional graph.
    Ensures:  the launch and its wait are gone, or nothing has changed; a second run changes
              nothing.
    Stats:    ``fused``, ``declined``; notes say of each launch what was decided and why.
    """

    numerics = Numerics.REASSOCIATING
    changes_launches = True
    reads_schedule = True
    collective: ClassVar[str]

    def __init__(
        self, cost: CostModel, *, obstacle: Callable[[str, str], str] | None = None
    ) -> None:
        self.cost = cost
        self._obstacle_of = obstacle or availability.why_not

    @classmethod
    def build(cls, context: PassContext) -> Fusion:
        return cls(context.cost)

    def digest(self) -> str:
        return self.cost.digest()

    def requires(self, graph: fx.Graph) -> None:
        check_functional(graph, self.name)

    @abc.abstractmethod
    def match(self, launch: fx.Node, wait: fx.Node) -> Match | str | None:
        """The consumers; a reason why they cannot be fused; None where no consumer is of the
        kind.
        """

    def run(self, graph: fx.Graph) -> PassStats:
        notes: list[str] = []
        fused = 0
        exposed = None
        for launch in launches(graph):
            waits = waits_of(launch)
            # A result that is read without a wait, or waited for twice, has a reader that the
            # kernel could not replace.
            if kind(launch) != self.collective or len(waits) != 1 or len(launch.users) != 1:
                continue
            found = self.match(launch, waits[0])
            if found is None:
                continue
            reason = found if isinstance(found, str) else self._obstacle(launch)
            if not reason and not isinstance(found, str):
                # Simulated once a graph, and only if something can be fused. After a fusion the
                # times are those of the graph before it, which all ranks have alike.
                exposed = exposed or simulate(graph, self.cost).exposed_by_launch
                machine = getattr(self.cost, "machine", None)
                if not isinstance(machine, Machine):
                    reason = "the cost model has no topology to predict the kernel from"
                else:
                    predicted = found.predict(machine, self.cost, exposed.get(launch.name, 0.0))
                    times = f"{predicted.unfused_us:.1f} -> {predicted.fused_us:.1f} us"
                    reason = "" if predicted.pays else f"{times}, less than {LEAST_GAIN:.0%} gained"
            where = f"{kind(launch)} %{launch.name}"
            where += f" ({user_line(launch)})" if user_line(launch) else ""
            if reason or isinstance(found, str):
                notes.append(f"declined {where}: {reason}")
            else:
                register_operators()
                kernel = found.apply(graph)
                kernel.meta[PREDICTED_US] = predicted.fused_us
                fused += 1
                notes.append(f"fused {where}: {times}")
            log.debug("%s: %s", self.name, notes[-1])
        return PassStats(
            fused > 0, {"fused": fused, "declined": len(notes) - fused}, notes=tuple(notes)
        )

    def _obstacle(self, launch: fx.Node) -> str:
        """Tell why no kernel can run on this launch's group and tensor; "" if one can."""
        (tensor,) = input_tensors(launch)
        # A shared library runs without Python.
        if is_aot_inductor():
            return "AOTInductor's libraries cannot call operators written in Python"
        group = argument(launch, "group_name")
        if not isinstance(group, str):
            return "the group is known only when the graph runs"
        reason = self._obstacle_of(group_name(launch), tensor.device.type)
        if reason:
            return reason
        if group_size(launch) < 2:
            return f"the group has {group_size(launch) or 'an unknown number of'} ranks"
        if tensor.dtype not in FLOATS:
            return f"kernels add float32, float16 and bfloat16, not {tensor.dtype}"
        if static_shape(launch.args[0]) is None:
            return "shapes are dynamic"
        return ""


def can_stand_above(nodes: Iterable[object], anchor: fx.Node) -> bool:
    """Return whether ``nodes`` stand above ``anchor``, or could with the views and casts that
    lead to them.
    """
    order = {node: i for i, node in enumerate(anchor.graph.nodes)}

    def can(node: object) -> bool:
        if not isinstance(node, fx.Node) or order[node] < order[anchor]:
            return True
        # Only what costs nothing or little may move: lifting a computation changes what is in
        # memory in between.
        moves = op_facts(node.target).view or node.target is CAST
        return moves and all(can(source) for source in node.all_input_nodes)

    return all(can(node) for node in nodes)


def lift_above(nodes: Iterable[object], anchor: fx.Node) -> None:
    """Make them stand there."""
    above = set[fx.Node]()
    for node in anchor.graph.nodes:
        if node is anchor:
            break
        above.add(node)

    def lift(node: object) -> None:
        if isinstance(node, fx.Node) and node not in above:
            for source in node.all_input_nodes:
                lift(source)
            anchor.prepend(node)
            above.add(node)

    for node in nodes:
        lift(node)


def erase_dead(graph: fx.Graph, launch: fx.Node) -> None:
    """Erase a launch and what is made of it, as far as nobody reads it. FX takes a launch and a
    wait for effects.
    """
    below = {launch}
    for node in list(graph.nodes):
        if any(source in below for source in node.all_input_nodes):
            below.add(node)
    for node in reversed(list(graph.nodes)):
        ends_here = node is launch or is_wait(node) or not node.is_impure()
        if node in below and not node.users and node.op == "call_function" and ends_here:
            sources = [source for source in node.all_input_nodes if source not in below]
            graph.erase_node(node)
            erase_unused(graph, sources)
