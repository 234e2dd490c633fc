"""Fuse all_gather, wait and matrix products into one kernel that multiplies rows as they come
in.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.cost.machine import Machine
from inductor_passes.fused.fusion import (
    Fusion,
    Match,
    Prediction,
    all_gather_matmul_us,
    can_stand_above,
    erase_dead,
    lift_above,
)
from inductor_passes.graph.collectives import argument, group_name, tensor_bytes
from inductor_passes.graph.edit import CAST, aten, emit, erase_unused, replace, static_shape, tensor

RESHAPES = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.alias.default,
        aten.detach.default,
        aten.clone.default,
    }
)
SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)


def row_source(node: fx.Node) -> fx.Node | None:
    """The node whose elements ``node`` has in the same order, with the same last dimension; else
    None.

    A reshape's input; and what was split and joined along another dimension, as gathers along it
    are unpacked, where no dimension before either is larger than one.
    """
    if node.op != "call_function":
        return None
    source = node.args[0] if node.target in RESHAPES else _split_and_joined(node)
    if not isinstance(source, fx.Node):
        return None
    shape, was = static_shape(node), static_shape(source)
    if not shape or not was or shape[-1] != was[-1] or math.prod(shape) != math.prod(was):
        return None
    return source


def row_views(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose ``row_source`` is ``node``."""
    ends: dict[fx.Node, None] = {}
    for user in node.users:
        if user.target in SPLITS:
            ends.update((end, None) for part in user.users for end in part.users)
        else:
            ends[user] = None
    return [end for end in ends if row_source(end) is node]


def reshaped(graph: fx.Graph, node: fx.Node, shape: Sequence[int], like: fx.Node) -> fx.Node:
    """``node`` in that shape, in the name of ``like``; the node itself if it has it already."""
    if static_shape(node) == tuple(shape):
        return node
    return emit(graph, aten.reshape.default, (node, list(shape)), like)


def _split_and_joined(cat: fx.Node) -> object:
    if cat.target is not aten.cat.default or not isinstance(cat.args[0], (list, tuple)):
        return None
    parts = list(cat.args[0])
    if not parts or not isinstance(parts[0], fx.Node) or parts[0].target is not operator.getitem:
        return None
    split = parts[0].args[0]
    if not isinstance(split, fx.Node) or split.target not in SPLITS:
        return None
    value = split.meta["val"]
    if [(p.target, p.args) for p in parts] != [
        (operator.getitem, (split, i)) for i in range(len(value))
    ]:
        return None
    source = split.args[0]
    assert isinstance(source, fx.Node)
    split_dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    cat_dim = cat.args[1] if len(cat.args) > 1 else cat.kwargs.get("dim", 0)
    whole, part = static_shape(source), tuple(value[0].shape)
    if not isinstance(split_dim, int) or not isinstance(cat_dim, int) or whole is None:
        return None
    leading = (*whole[: split_dim % len(whole)], *part[: cat_dim % len(part)])
    return source if all(size == 1 for size in leading) else None


MAX_WEIGHTS = 3
PRODUCTS = (aten.mm.default, aten.addmm.default)


class FuseAllGatherMatmul(Fusion):
    """Fuse a gather of rows and up to three matrix products of these rows into one kernel.

    Looks through views that keep rows in order, and through one cast of all of them. Other readers
    of the gathered rows get them from the kernel.
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
    """Views of the gathered rows that keep their order, what else reads them, and the cast they
    share.

    If a cast is the only reader of the wait, everything is about what it makes; other casts are
    others.
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
    """Return whether ``rows`` is the left operand, and only that, of a product that the kernel
    can make.
    """
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
