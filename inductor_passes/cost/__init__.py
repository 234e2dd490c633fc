"""Runtime of a node and of a collective, in microseconds, from a topology file."""

from inductor_passes.cost.model import CostModel, TopologyCostModel
from inductor_passes.cost.topology import (
    Topology,
    default_topology,
    load_topology,
    shipped_topologies,
)

__all__ = [
    "CostModel",
    "Topology",
    "TopologyCostModel",
    "default_topology",
    "load_topology",
    "shipped_topologies",
]
