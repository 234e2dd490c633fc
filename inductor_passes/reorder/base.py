"""Base of the passes that only move nodes, where nothing has scheduled the whole graph."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from inductor_passes.base import GraphPass
from inductor_passes.graph.invariants import check_functional, check_permutation


class Reorder(GraphPass):
    """The same nodes in another order.

    Requires: a functional graph.
    Ensures:  same nodes, same launch order within each group.
    """

    schedules = True
    fallback = True

    def requires(self, graph: fx.Graph) -> None:
        check_functional(graph, self.name)

    def ensures(self, before: Sequence[fx.Node], graph: fx.Graph) -> None:
        check_permutation(before, graph, self.name)
