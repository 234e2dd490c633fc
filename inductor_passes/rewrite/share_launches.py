"""Reuse of launches: a value gathered once need not be gathered again."""

from __future__ import annotations

from torch import fx

from inductor_passes.base import PassStats
from inductor_passes.graph.collectives import (
    kind,
    launches,
    output_bytes,
    payload_bytes,
    signature,
    waits_of,
)
from inductor_passes.graph.edit import replace
from inductor_passes.rewrite.base import Rewrite

SHARED_KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")


class ShareLaunches(Rewrite):
    """One launch for several that do the same with the same source.

    A result above ``budget_bytes`` is not kept for a later reader: it may have been given up on
    purpose, as when parameters are resharded between uses.

    Requires: a functional graph.
    Ensures:  every bit as before; a second run changes nothing.
    Stats:    ``launches_removed``, ``bytes_saved`` (payload of this rank).
    """

    name = "share_launches"
    shows_in_plan = True

    def __init__(self, budget_bytes: int = 1 << 30) -> None:
        self.budget_bytes = budget_bytes

    def digest(self) -> str:
        return f"{self.budget_bytes}"

    def run(self, graph: fx.Graph) -> PassStats:
        count = saved = 0
        first_of: dict[object, fx.Node] = {}
        position: dict[fx.Node, int] = {}
        for launch in launches(graph):
            if kind(launch) not in SHARED_KINDS or len(waits_of(launch)) != 1:
                continue
            first = first_of.setdefault(signature(launch), launch)
            if first is launch or output_bytes(first) > self.budget_bytes:
                continue
            position = position or {node: i for i, node in enumerate(graph.nodes)}
            wait, own = waits_of(first)[0], waits_of(launch)[0]
            if position[wait] > position[own]:
                own.prepend(wait)
                position[wait] = position[own]
            replace(own, wait, self.name)
            saved += payload_bytes(launch)
            count += 1
            graph.erase_node(own)
            graph.erase_node(launch)
        return PassStats(count > 0, {"launches_removed": count, "bytes_saved": saved})
