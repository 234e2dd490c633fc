"""all_reduce, wait, additions, RMS or layer norm -> one kernel.

The kernel gives the total, the statistics and the end of the norm; whatever else of the decomposed norm is
read, such as by a backward pass, is made again from those.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.cost.machine import Machine
from inductor_passes.fuse.base import Fusion, Match, can_stand_above, erase_dead, lift_above
from inductor_passes.fuse.norms import MatchedNorm, find_norm
from inductor_passes.fuse.prediction import Prediction, all_reduce_norm_us
from inductor_passes.fuse.rows import reshaped, row_views
from inductor_passes.graph.collectives import group_name, group_size, reduce_op, tensor_bytes
from inductor_passes.graph.edit import aten, emit, erase_unused, replace, static_shape, tensor
from inductor_passes.kernels.norm import MAX_ROW, TWO_SHOT_BYTES


class FuseAllReduceNorm(Fusion):
    """A sum over ranks, a bias and a residual added to it, and the norm of the total.

    The kernel rounds the total and the norm to their types, and nothing between.
    """

    name = "fuse_all_reduce_add_norm"
    collective = "all_reduce"

    def match(self, launch: fx.Node, wait: fx.Node) -> Match | str | None:
        path, terms = [wait], list[fx.Node]()
        norm = find_norm(wait)
        while norm is None:
            step = _added(path[-1])
            if step is None:
                return None
            path.append(step[0])
            terms += step[1]
            norm = find_norm(path[-1])
        total = path[-1]
        shape, value, given = static_shape(total), tensor(total), tensor(launch.args[0])
        if reduce_op(launch) != "sum":
            return f"kernels make sums, not {reduce_op(launch)}"
        if shape is None or value is None or given is None:
            return "shapes are dynamic"
        if shape[-1] > MAX_ROW:
            return f"a row of {shape[-1]} does not fit into registers: at most {MAX_ROW}"
        if value.dtype != given.dtype or norm.rstd.meta["val"].dtype != torch.float32:
            return f"the total is {value.dtype}, the sum {given.dtype}, the norm {norm.rstd.meta['val'].dtype}"
        if value.numel() != given.numel():
            return "the sum is broadcast to what is added to it"
        biases = [t for t in terms if static_shape(t) == shape[-1:]]
        residuals = [t for t in terms if static_shape(t) == shape and len(shape) > 1]
        if len(biases) > 1 or len(residuals) > 1 or len(biases) + len(residuals) < len(terms):
            return "what is added to the sum is not one bias and one residual"
        if any(len(node.users) > 1 for node in path[:-1]):
            return "the sum is read before everything is added to it"
        if not can_stand_above((norm.weight, norm.shift), total):
            return "the norm's weight is computed later"
        return AllReduceNorm(launch, wait, total, biases, residuals, norm, group_size(launch))


@dataclass(frozen=True, slots=True)
class AllReduceNorm(Match):
    """``total`` is the sum with what is added to it."""

    launch: fx.Node
    wait: fx.Node
    total: fx.Node
    biases: Sequence[fx.Node]
    residuals: Sequence[fx.Node]
    norm: MatchedNorm
    world: int

    def predict(self, machine: Machine, cost: CostModel, exposed_us: float) -> Prediction:
        value = tensor(self.wait)
        assert value is not None
        payload = tensor_bytes(value)
        chain_us = sum(cost.compute_us(node) for node in (self.total, *self.norm.nodes))
        fused = all_reduce_norm_us(
            machine,
            payload,
            self.world,
            two_shot=payload > TWO_SHOT_BYTES,
            streams=2 + len(self.residuals),
        )
        return Prediction(exposed_us + chain_us, fused)

    def apply(self, graph: fx.Graph) -> fx.Node:
        norm, total = self.norm, self.total
        x = self.launch.args[0]
        assert isinstance(x, fx.Node)
        operands = [
            next(iter(self.residuals), None),
            next(iter(self.biases), None),
            norm.weight,
            *([norm.shift] if norm.mean is not None else []),
        ]
        packet = torch.ops.inductor_passes
        op = packet.all_reduce_add_rmsnorm if norm.mean is None else packet.all_reduce_add_layernorm
        statistics = [n for n in (norm.mean, norm.rstd) if n is not None]
        lift_above((norm.weight, norm.shift), total)
        with graph.inserting_before(total.next):
            x = reshaped(graph, x, static_shape(total) or (), self.launch)
            tail = (norm.eps, norm.end.meta["val"].dtype, group_name(self.launch))
            kernel = emit(graph, op.default, (x, *operands, *tail), norm.end)
            made = {
                old: emit(graph, operator.getitem, (kernel, i), old)
                for i, old in enumerate([norm.end, total, *statistics])
            }
        for old, new in made.items():
            replace(old, new, FuseAllReduceNorm.name)
        erase_unused(graph, norm.nodes)
        erase_dead(graph, self.launch)
        return kernel


def _added(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """The one reader of ``node`` that adds a tensor to it or views its rows, and what it adds."""
    views = row_views(node)
    if len(views) == 1:
        return views[0], []
    adds = [u for u in node.users if u.target is aten.add.Tensor and not u.kwargs]
    if len(adds) != 1:
        return None
    terms = [arg for arg in adds[0].args if isinstance(arg, fx.Node) and arg is not node]
    return (adds[0], terms) if len(terms) == 1 else None
