"""all_gather, wait, matrix products -> one kernel that multiplies rows as they come in."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.cost.machine import Machine
from inductor_passes.fuse.base import Fusion, Match, can_stand_above, erase_dead, lift_above
from inductor_passes.fuse.prediction import Prediction, all_gather_matmul_us
from inductor_passes.fuse.rows import SPLITS, reshaped, row_views
from inductor_passes.graph.collectives import argument, group_name, tensor_bytes
from inductor_passes.graph.edit import CAST, aten, emit, erase_unused, replace, tensor

MAX_WEIGHTS = 3
PRODUCTS = (aten.mm.default, aten.addmm.default)


class FuseAllGatherMatmul(Fusion):
    """Gather of rows and products of the gathered rows: up to three weights in one kernel.

    Looks through views that keep rows in order, and through one cast of all of them. Other readers of
    the gathered rows get them from the kernel.
    """

    name = "fuse_all_gather_matmul"
    collective = "all_gather"

    def match(self, launch: fx.Node, wait: fx.Node) -> Match | str | None:
        size = argument(launch, "group_size")
        if not isinstance(size, int) or tensor(launch.args[0]) is None:
            return None
        rows, others, cast = _rows_of(wait)
        products = [u for n in rows for u in n.users if u.target in PRODUCTS and _reads(u, n)]
        if not products:
            right = any(u.target in PRODUCTS for n in others for u in (n, *n.users))
            return (
                "the gathered tensor is not the left operand of a product that the kernel makes"
                if right
                else None
            )
        first = products[0]
        fusible = [
            product
            for product in products
            if can_stand_above(_operands(product), wait)
            and product.target is first.target
            and _layout(product) == _layout(first)
        ][:MAX_WEIGHTS]
        if not fusible:
            return "its weights are computed after the gather has ended"
        others = [n for n in others if n not in fusible]
        others += [p for p in products if p not in fusible]
        return AllGatherMatmul(launch, wait, cast, fusible, others, size)


@dataclass(frozen=True, slots=True)
class AllGatherMatmul(Match):
    """``products`` become the kernel's; ``others`` read the gathered rows."""

    launch: fx.Node
    wait: fx.Node
    cast: fx.Node | None
    products: list[fx.Node]
    others: list[fx.Node]
    world: int

    def predict(self, machine: Machine, cost: CostModel, exposed_us: float) -> Prediction:
        rows = tensor(self.launch.args[0])
        assert rows is not None
        payload = tensor_bytes(rows)
        matmul_us = sum(cost.compute_us(product) for product in self.products)
        cast_us = 0.0 if self.cast is None else cost.compute_us(self.cast)
        copied = 2 * self.world * payload if self.others else 0
        fused = all_gather_matmul_us(machine, payload, self.world, matmul_us, copied)
        return Prediction(exposed_us + matmul_us + cast_us, fused)

    def apply(self, graph: fx.Graph) -> fx.Node:
        shard = self.launch.args[0]
        assert isinstance(shard, fx.Node)
        gathered = self.wait if self.cast is None else self.cast
        left = tensor(_left(self.products[0]))
        assert left is not None
        lift_above([n for product in self.products for n in _operands(product)], self.wait)
        with graph.inserting_before(self.wait):
            if self.cast is not None:
                shard = emit(graph, CAST, (shard, self.cast.args[1]), self.cast)
            flat = (left.shape[0] // self.world, left.shape[1])
            rows = reshaped(graph, shard, flat, self.launch)
            kernel = emit(
                graph,
                torch.ops.inductor_passes.all_gather_matmul.default,
                (
                    rows,
                    [_operands(product)[0] for product in self.products],
                    [bias for product in self.products for bias in _operands(product)[1:]],
                    "none",
                    bool(self.others),
                    group_name(self.launch),
                    self.world,
                ),
                self.products[0],
            )
            outs = [
                emit(graph, operator.getitem, (kernel, i), product)
                for i, product in enumerate(self.products)
            ]
            if self.others:
                whole = emit(graph, operator.getitem, (kernel, len(outs)), self.launch)
                whole = reshaped(graph, whole, gathered.meta["val"].shape, self.launch)
                replace(gathered, whole, FuseAllGatherMatmul.name)
        for product, out in zip(self.products, outs, strict=True):
            replace(product, out, FuseAllGatherMatmul.name)
        erase_unused(graph, self.products)
        erase_dead(graph, self.launch)
        return kernel


def _rows_of(wait: fx.Node) -> tuple[list[fx.Node], list[fx.Node], fx.Node | None]:
    """Views of the gathered rows that keep their order, what else reads them, and the cast they share.

    If a cast is the only reader of the wait, everything is about what it makes; other casts are others.
    """
    (only,) = wait.users if len(wait.users) == 1 else (None,)
    cast = only if only is not None and only.target is CAST else None
    rows = [wait if cast is None else cast]
    others: list[fx.Node] = []
    for node in rows:
        views = row_views(node)
        rows += views
        for user in node.users:
            unpacks = user.target in SPLITS and any(
                end in views for part in user.users for end in part.users
            )
            if (
                user not in views
                and not unpacks
                and not (user.target in PRODUCTS and _reads(user, node))
            ):
                others.append(user)
    return rows, others, cast


def _left(product: fx.Node) -> fx.Node:
    left = product.args[1 if product.target is aten.addmm.default else 0]
    assert isinstance(left, fx.Node)
    return left


def _operands(product: fx.Node) -> list[object]:
    """The weight, and the bias where there is one."""
    if product.target is aten.addmm.default:
        return [product.args[2], product.args[0]]
    return [product.args[1]]


def _reads(product: fx.Node, rows: fx.Node) -> bool:
    """Return whether ``rows`` is the left operand, and only that, of a product that the kernel can make."""
    operands = _operands(product)
    if product.kwargs or _left(product) is not rows or rows in operands:
        return False
    values = [tensor(n) for n in (rows, *operands)]
    types = {value.dtype for value in values if value is not None}
    dims = [value.dim() for value in values if value is not None]
    if dims not in ([2, 2], [2, 2, 1]) or len(dims) < len(values) or len(types) > 1:
        return False
    whole = tensor(product)  # a bias may be one number for all columns
    return whole is not None and all(v is None or v.shape == whole.shape[1:] for v in values[2:])


def _layout(product: fx.Node) -> tuple[bool, bool]:
    """Tell which of the weight's strides are one: the kernel reads weights of one layout."""
    weight = tensor(_operands(product)[0])
    assert weight is not None
    return weight.stride(0) == 1, weight.stride(1) == 1
