"""A reduce_scatter that the library runs as an all_reduce, done by an exchange of parts and a sum of our own."""

from __future__ import annotations

import torch
from torch import fx

from inductor_passes.base import Numerics, PassContext, PassStats
from inductor_passes.cost import CostModel
from inductor_passes.cost.machine import Machine
from inductor_passes.graph.collectives import (
    group_size,
    launches,
    output_bytes,
    payload_bytes,
    reduce_op,
    waits_of,
)
from inductor_passes.graph.edit import aten, emit, replace, static_shape, tensor
from inductor_passes.rewrite.base import Rewrite

c10d = torch.ops._c10d_functional


class ScatterByExchange(Rewrite):
    """reduce_scatter -> all_to_all, then the sum of what came: half the bytes on gloo's links.

    Gloo reduces and scatters by an all_reduce of which each rank keeps its part. Here each rank sends every
    other its part instead, and adds what it gets in the order of ranks; Inductor fuses the sum with what reads
    it. Only where the topology says that a reduce_scatter takes more than one round (``reduce_scatter_rounds``),
    and predicts a gain with the sum counted.

    Requires: a functional graph; static shapes; sums and averages of floating-point numbers.
    Ensures:  the same sums, perhaps in another order; a second run changes nothing.
    Stats:    ``scatters_replaced``, ``bytes_saved`` (on the link, by this rank).
    """

    name = "scatter_by_exchange"
    numerics = Numerics.REASSOCIATING
    shows_in_plan = True

    def __init__(self, cost: CostModel | None = None) -> None:
        self.cost = cost

    @classmethod
    def build(cls, context: PassContext) -> ScatterByExchange:
        return cls(context.cost)

    def digest(self) -> str:
        return self.cost.digest() if self.cost is not None else ""

    def run(self, graph: fx.Graph) -> PassStats:
        count = saved = 0
        machine = getattr(self.cost, "machine", None)
        if isinstance(machine, Machine) and machine.reduce_scatter_rounds > 1:
            for launch in launches(graph):
                if _is_sum_of_floats(launch) and self._exchange(graph, launch, machine):
                    ranks = group_size(launch)
                    once = payload_bytes(launch) * (ranks - 1) / ranks
                    saved += int(once * (machine.reduce_scatter_rounds - 1))
                    count += 1
                    graph.erase_node(waits_of(launch)[0])
                    graph.erase_node(launch)
        return PassStats(count > 0, {"scatters_replaced": count, "bytes_saved": saved})

    def _exchange(self, graph: fx.Graph, launch: fx.Node, machine: Machine) -> bool:
        """Put the exchange beside ``launch``, for its readers; return whether it is predicted to be faster."""
        assert self.cost is not None
        source, operation, ranks, group = launch.args
        first, *rest = static_shape(launch) or ()
        with graph.inserting_before(launch):
            args = (source, [first] * ranks, [first] * ranks, group)  # type: ignore[operator]
            sent = emit(graph, c10d.all_to_all_single.default, args, launch)
        own_us = machine.kernel_us(output_bytes(sent) + output_bytes(launch))
        if self.cost.launch_us(sent) + own_us >= self.cost.launch_us(launch):
            graph.erase_node(sent)
            return False
        wait = waits_of(launch)[0]
        with graph.inserting_before(wait):
            arrived = emit(graph, c10d.wait_tensor.default, (sent,), wait)
            parts = emit(graph, aten.view.default, (arrived, [ranks, first, *rest]), wait)
            total = emit(graph, aten.sum.dim_IntList, (parts, [0]), wait)
            if operation == "avg":
                total = emit(graph, aten.div.Tensor, (total, ranks), wait)
        replace(wait, total, self.name)
        return True


def _is_sum_of_floats(launch: fx.Node) -> bool:
    if launch.target is not c10d.reduce_scatter_tensor.default or len(waits_of(launch)) != 1:
        return False
    value, shape = tensor(launch), static_shape(launch)
    if value is None or not shape or not value.dtype.is_floating_point:
        return False
    return group_size(launch) > 1 and reduce_op(launch) in ("sum", "avg") and 0 not in shape
