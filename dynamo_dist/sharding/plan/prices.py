"""The scheduler's machine as the planner's: the same work costs the same for both."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.sharding.plan.cost import Prices
from inductor_passes.cost import Topology, default_topology, load_topology
from inductor_passes.cost.collectives import shape_of_ranks
from inductor_passes.cost.machine import Machine

RULES = 2  # how work becomes figures: plans made by other rules are made anew


class TopologyPrices(Machine):
    """A machine in a job of ``world`` ranks. Implements ``Prices``."""

    __slots__ = ("world",)

    def __init__(self, topology: Topology, world: int) -> None:
        super().__init__(topology)
        self.world = world

    def collective_us(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        shape = shape_of_ranks(ranks, self.topology.ranks_per_node, self.world)
        return self.call_us(kind, [payload_bytes], shape)

    def digest(self) -> str:
        """Of the figures and the size of the job: the same on every rank, so that a plan is made once."""
        figures = dataclasses.asdict(self.topology)
        del figures["sources"]
        text = json.dumps([RULES, figures, self.world], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def prices_of(topology: str | None, inputs: Sequence[Any]) -> Prices:
    """Return the planner's prices: of the topology named, or of the default for the device of the inputs."""
    devices = (given.device.type for given in inputs if isinstance(given, torch.Tensor))
    named = topology or default_topology(next(devices, "cpu"))
    return TopologyPrices(load_topology(named), dist.get_world_size())
