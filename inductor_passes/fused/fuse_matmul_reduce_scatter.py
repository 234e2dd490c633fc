"""matrix product, reduce_scatter, wait -> kernels that send tiles as they are done, and add what
came.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.cost.machine import Machine
from inductor_passes.fused.fuse_all_gather_matmul import reshaped, row_source
from inductor_passes.fused.fusion import (
    Fusion,
    Match,
    Prediction,
    erase_dead,
    matmul_reduce_scatter_us,
)
from inductor_passes.graph.collectives import argument, group_name, reduce_op, tensor_bytes
from inductor_passes.graph.edit import CAST, aten, emit, replace, tensor

REDUCE_OPS = ("sum", "avg")


class FuseMatmulReduceScatter(Fusion):
    """Fuse a matrix product and the reduce_scatter of its rows into one kernel.

    Looks through views that keep rows in order.
    """

    name = "fuse_matmul_reduce_scatter"
    collective = "reduce_scatter"

    def match(self, launch: fx.Node, wait: fx.Node) -> Match | str | None:
        node = launch.args[0]
        while isinstance(node, fx.Node) and row_source(node) is not None:
            if len(node.users) > 1:
                return "the unreduced product is read elsewhere" if _leads_to_mm(node) else None
            node = row_source(node)
        size = argument(launch, "group_size")
        if not isinstance(node, fx.Node) or not isinstance(size, int):
            return None
        # The kernel sends parts in the type of the product: a sum over ranks in another type has
        # other numbers.
        if node.target is CAST and _leads_to_mm(node):
            return "the product is cast before it is reduced"
        if node.target is not aten.mm.default:
            return None
        if len(node.users) > 1:
            return "the unreduced product is read elsewhere"
        if reduce_op(launch) not in REDUCE_OPS:
            return f"kernels make sums and averages, not {reduce_op(launch)}"
        value = tensor(node)
        if value is not None and not isinstance(value.shape[0], int):
            return "shapes are dynamic"
        if value is None or value.shape[0] % size:
            return f"its rows do not divide by {size} ranks"
        return MatmulReduceScatter(launch, wait, node, size)


@dataclass(frozen=True, slots=True)
class MatmulReduceScatter(Match):
    """``product`` is read by the launch alone."""

    launch: fx.Node
    wait: fx.Node
    product: fx.Node
    world: int

    def predict(self, machine: Machine, cost: CostModel, exposed_us: float) -> Prediction:
        result = tensor(self.wait)
        assert result is not None
        matmul_us = cost.compute_us(self.product)
        fused = matmul_reduce_scatter_us(machine, tensor_bytes(result), self.world, matmul_us)
        return Prediction(matmul_us + exposed_us, fused)

    def apply(self, graph: fx.Graph) -> fx.Node:
        a, b = self.product.args
        with graph.inserting_before(self.product):
            kernel = emit(
                graph,
                torch.ops.inductor_passes.matmul_reduce_scatter.default,
                (a, b, reduce_op(self.launch), group_name(self.launch), self.world),
                self.product,
            )
            rows = reshaped(graph, kernel, self.wait.meta["val"].shape, self.launch)
        replace(self.wait, rows, FuseMatmulReduceScatter.name)
        erase_dead(graph, self.launch)
        return kernel


def _leads_to_mm(node: fx.Node) -> bool:
    source: object = node
    while isinstance(source, fx.Node) and source.target is not aten.mm.default:
        source = source.args[0] if source.target is CAST else row_source(source)
    return isinstance(source, fx.Node)
