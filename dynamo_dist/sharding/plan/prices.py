"""The scheduler's machine as the planner's: the same work costs the same for both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.sharding.plan.cost import Prices
from inductor_passes.attach import measured
from inductor_passes.machine import Topology, TopologyCostModel, default_topology, load_topology
from inductor_passes.machine.prices.group_shape import shape_of_ranks
from inductor_passes.machine.prices.machine import Machine
from inductor_passes.machine.times.times import Times

log = logging.getLogger(__name__)
RULES = 2  # how work becomes figures: plans made by other rules are made anew


class TopologyPrices(Machine):
    """A machine in a job of ``world`` ranks, as ``times`` of its steps show it. Implements ``Prices``."""

    __slots__ = ("times", "world")

    def __init__(self, topology: Topology, world: int, times: Times | None = None) -> None:
        super().__init__(topology, times)
        self.world = world
        self.times = "" if times is None else times.digest

    def collective_us(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        shape = shape_of_ranks(ranks, self.topology.ranks_per_node, self.world)
        return self.call_us(kind, [payload_bytes], shape)

    def digest(self) -> str:
        """Of the figures and the size of the job: the same on every rank, so that a plan is made once."""
        figures = dataclasses.asdict(self.topology)
        del figures["sources"]
        measured_times = [self.times] if self.times else []
        text = json.dumps([RULES, figures, self.world, *measured_times], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def prices_of(topology: str | None, inputs: Sequence[Any], costs: str = "model") -> Prices:
    """Return the planner's prices: of the topology named, or of the default for the device of the inputs.

    Where this job has adopted measured times they count, and with ``costs="measured"`` those that one before has kept.
    """
    devices = (given.device.type for given in inputs if isinstance(given, torch.Tensor))
    machine = TopologyCostModel(load_topology(topology or default_topology(next(devices, "cpu"))))
    times = measured.times_of(measured.EVERYWHERE, costs)
    if times is not None and times.machine != machine.machine_name:
        log.warning(
            "Measured times are not used for placements: they are of another machine (%s, and this is %s).",
            times.machine, machine.machine_name,
        )  # fmt: skip
        times = None
    return TopologyPrices(machine.topology, dist.get_world_size(), times)
