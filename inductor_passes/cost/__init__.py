"""Runtime of a node and of a collective, in microseconds, from a topology file."""

from inductor_passes.cost.model import CostModel

__all__ = ["CostModel"]
