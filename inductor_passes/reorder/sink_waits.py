"""Let a collective run as long as nobody needs its result."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from inductor_passes.base import PassStats
from inductor_passes.graph.aliasing import mutated_inputs
from inductor_passes.graph.collectives import is_wait, launch_of
from inductor_passes.graph.order import relink
from inductor_passes.reorder.base import Reorder
from inductor_passes.simulate.memory import memory_owners

aten = torch.ops.aten
# What gathers are unpacked with: it moves along, or it would hold its wait where it stands.
UNPACKING = frozenset(
    {
        operator.getitem,
        aten.cat.default,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.clone.default,
        torch.ops.prims.convert_element_type.default,
    }
)


class SinkWaits(Reorder):
    """Sink each ``wait_tensor`` to just above its first user, so more compute hides the collective.

    It stays above a write to what its launch reads: the link may read it until then. Views, casts and
    concatenations of nothing but waited values count as part of the wait.

    Requires: a functional graph.
    Ensures:  same nodes, same launch order; running it twice changes nothing.
    Stats:    ``waits_sunk``.
    """

    name = "sink_waits"

    def run(self, graph: fx.Graph) -> PassStats:
        nodes = list(graph.nodes)
        floating: set[fx.Node] = set()
        for node in nodes:
            if node.users and (is_wait(node) or _unpacks(node, floating)):
                floating.add(node)
        # slot: the index of the node that a floating node must stand above.
        slot = {node: index for index, node in enumerate(nodes)}
        overwritten = _overwritten(graph)
        for node in reversed(nodes):
            if node in floating:
                slot[node] = min([slot[user] for user in node.users] + overwritten.get(node, []))
        above: dict[int, list[fx.Node]] = {}
        for node in nodes:
            if node in floating:
                above.setdefault(slot[node], []).append(node)
        order: list[fx.Node] = []
        for index, node in enumerate(nodes):
            if node not in floating:
                order.extend(above.get(index, ()))
                order.append(node)
        crossed = _crossed(nodes, order)
        relink(graph, order)
        return PassStats(changed=nodes != order, counters={"waits_sunk": crossed})


def _overwritten(graph: fx.Graph) -> dict[fx.Node, list[int]]:
    """For each wait the indices of later nodes that write to what its launch reads."""
    nodes, owners = list(graph.nodes), memory_owners(graph)
    owner = dict(zip(nodes, owners, strict=True))
    writes = [
        (index, {owner[written] for written in mutated_inputs(node)})
        for index, node in enumerate(nodes)
    ]
    writes = [(index, written) for index, written in writes if written]
    found: dict[fx.Node, list[int]] = {}
    for index, node in enumerate(nodes):
        launch = launch_of(node) if is_wait(node) else None
        if launch is not None:
            reads = {owner[source] for source in launch.all_input_nodes}
            found[node] = [at for at, written in writes if at > index and written & reads]
    return found


def _unpacks(node: fx.Node, floating: set[fx.Node]) -> bool:
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if not all(source in floating for source in node.all_input_nodes):
        return False
    return node.target in UNPACKING or returns_view(node)


def returns_view(node: fx.Node) -> bool:
    """Return whether the op returns a view of its input, by its schema."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    returned = target._schema.returns
    return bool(returned) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returned
    )


def _crossed(before: Sequence[fx.Node], after: Sequence[fx.Node]) -> int:
    """Count the waits that have a node that does not float above them now, and had it below."""
    old = {node: index for index, node in enumerate(before)}
    latest, crossed = -1, 0
    for node in after:
        if is_wait(node):
            crossed += latest > old[node]
        latest = max(latest, old[node])
    return crossed
