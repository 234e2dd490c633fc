"""Keep what ranks decided on a joint graph, for the forward and the backward graph made of it.

What a pass does to a joint graph is in both halves. Launches carry the decision into them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from inductor_passes.graph.collectives import JOINT, is_launch
from inductor_passes.ranks.collective_trace import PROGRAM, CollectiveTrace
from inductor_passes.records import PassRecord


@dataclass(frozen=True, slots=True)
class Joint:
    """Describe the joint graph that a graph is a half of.

    ``plan``: how all ranks launch it, with its chunks named; ``PROGRAM`` if it was left whole.
    ``trace``: its launches before; None where no ranks need to agree. ``record``: the record of
    the pass that cut it.
    """

    plan: str
    trace: CollectiveTrace | None = None
    record: PassRecord | None = None

    @property
    def is_cut(self) -> bool:
        """Return whether it was cut."""
        return self.plan != PROGRAM

    @property
    def key(self) -> str:
        """The name of its trace, if it was cut."""
        return self.trace.key if self.is_cut and self.trace is not None else ""


def note(graph: fx.Graph, joint: Joint) -> None:
    """Note the outcome on all launches of a joint graph."""
    for node in graph.nodes:
        if is_launch(node):
            node.meta[JOINT] = joint


def half_of(graph: fx.Graph) -> Joint | None:
    """Return the joint graph that a graph with launches is a half of; None if there was none, or
    nobody looked at it.
    """
    found = (node.meta.get(JOINT) for node in graph.nodes if is_launch(node))
    return next((joint for joint in found if joint is not None), None)
