"""Fuse all_reduce, wait, additions and an RMS or layer norm into one kernel.

The kernel returns the total, the statistics and the result of the norm. Other nodes of the
decomposed norm may have readers, such as a backward pass. The pass computes those again from the
kernel's results.

Let ``x`` be the input in float32. An RMS norm is ``x * rsqrt(mean(x * x) + eps) [* weight]``. A
layer norm is ``(x - mean) * rsqrt(variance + eps) [* weight] [+ shift]``, with mean and variance
from one ``var_mean``. Where the program's dtype is narrower, casts stand before and after the norm.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.cost.machine import Machine
from inductor_passes.fused.fuse_all_gather_matmul import reshaped, row_views
from inductor_passes.fused.fusion import (
    Fusion,
    Match,
    Prediction,
    all_reduce_norm_us,
    can_stand_above,
    erase_dead,
    lift_above,
)
from inductor_passes.fused.kernels.all_reduce_add_norm import MAX_ROW, TWO_SHOT_BYTES
from inductor_passes.graph.collectives import group_name, group_size, reduce_op, tensor_bytes
from inductor_passes.graph.edit import CAST, aten, emit, erase_unused, replace, static_shape, tensor


@dataclass(frozen=True, slots=True)
class MatchedNorm:
    """A norm: its statistics ``[..., 1]``, the end of the chain, and all of its ``nodes``, the end
    first.

    ``mean`` is there for a layer norm only; ``weight`` and ``shift`` are rows.
    """

    rstd: fx.Node
    end: fx.Node
    eps: float
    mean: fx.Node | None
    weight: fx.Node | None
    shift: fx.Node | None
    nodes: tuple[fx.Node, ...]


def find_norm(node: fx.Node) -> MatchedNorm | None:
    """The norm of the last dimension of ``node``, if one of its readers begins one."""
    wide = [u for u in node.users if u.target is CAST and u.args[1] is torch.float32]
    for source in (node, *wide):
        for found in (_rms(source), _layer(source)):
            if found is not None:
                inside, rstd, eps, mean, normed = found
                return _with_weight(node, inside, rstd, eps, mean, normed)
    return None


_Core = tuple[list[fx.Node], fx.Node, float, fx.Node | None, fx.Node]


def _rms(x: fx.Node) -> _Core | None:
    # Decompositions write the square as ``pow`` or as ``mul``.
    for square in x.users:
        is_square = (square.target is aten.pow.Tensor_Scalar and square.args[1] == 2) or (
            square.target is aten.mul.Tensor and square.args == (x, x)
        )
        for mean in _users(square, aten.mean.dim) if is_square else ():
            if not _over_last(mean, x) or mean.args[2:] != (True,) or mean.kwargs:
                continue
            for shifted, rstd, eps in _rsqrt(mean):
                for normed in _users(rstd, aten.mul.Tensor):
                    if x in normed.args:
                        return [normed, rstd, shifted, mean, square], rstd, eps, None, normed
    return None


def _layer(x: fx.Node) -> _Core | None:
    for both in _users(x, aten.var_mean.correction):
        if not _over_last(both, x) or both.kwargs != {"correction": 0, "keepdim": True}:
            continue
        part = {u.args[1]: u for u in both.users if u.target is operator.getitem}
        if set(part) != {0, 1}:
            continue
        variance, mean = part[0], part[1]
        for shifted, rstd, eps in _rsqrt(variance):
            for centred in _users(mean, aten.sub.Tensor):
                for normed in _users(rstd, aten.mul.Tensor):
                    if centred.args == (x, mean) and centred in normed.args:
                        inside = [normed, centred, rstd, shifted, variance, mean, both]
                        return inside, rstd, eps, mean, normed
    return None


def _rsqrt(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node, float]]:
    """``rsqrt(value + eps)``: the sum, the root, eps."""
    for shifted in (*_users(value, aten.add.Tensor), *_users(value, aten.add.Scalar)):
        if shifted.args[0] is value and isinstance(shifted.args[1], float) and not shifted.kwargs:
            for rstd in _users(shifted, aten.rsqrt.default):
                yield shifted, rstd, shifted.args[1]


def _with_weight(
    source: fx.Node,
    inside: list[fx.Node],
    rstd: fx.Node,
    eps: float,
    mean: fx.Node | None,
    normed: fx.Node,
) -> MatchedNorm:
    """Follow the norm to its end: a weight, a shift, a cast to the type of ``source``."""
    narrow = tensor(source)
    shape = static_shape(source)
    weight = shift = None
    end = normed
    while len(end.users) == 1:
        (user,) = end.users
        (other,) = [a for a in user.args if a is not end][:1] or [None]
        is_row = (
            isinstance(other, fx.Node) and shape is not None and static_shape(other) == shape[-1:]
        )
        if user.target is aten.mul.Tensor and is_row and weight is None and shift is None:
            weight = other
        elif (
            user.target is aten.add.Tensor
            and is_row
            and shift is None
            and mean is not None
            and not user.kwargs
        ):
            shift = other
        elif not (user.target is CAST and narrow is not None and user.args[1] is narrow.dtype):
            break
        end = user
        inside = [end, *inside]
    assert weight is None or isinstance(weight, fx.Node)
    assert shift is None or isinstance(shift, fx.Node)
    return MatchedNorm(rstd, end, eps, mean, weight, shift, tuple(inside))


def _users(node: fx.Node, target: object) -> list[fx.Node]:
    return [user for user in node.users if user.target is target]


def _over_last(reduction: fx.Node, x: fx.Node) -> bool:
    value = tensor(x)
    dims = reduction.args[1] if len(reduction.args) > 1 else None
    return value is not None and dims in ([-1], [value.dim() - 1])


class FuseAllReduceNorm(Fusion):
    """Fuse a sum over ranks, the bias and residual added to it, and the norm into one kernel.

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
            return (
                f"the total is {value.dtype}, the sum {given.dtype}, the norm "
                f"{norm.rstd.meta['val'].dtype}"
            )
        if value.numel() != given.numel():
            return "the sum is broadcast to what is added to it"
        biases = [t for t in terms if static_shape(t) == shape[-1:]]
        residuals = [t for t in terms if static_shape(t) == shape and len(shape) > 1]
        if len(biases) > 1 or len(residuals) > 1 or len(biases) + len(residuals) < len(terms):
            return "what is added to the sum is not one bias and one residual"
        # The kernel never writes the sum before the additions, so nobody else may read it.
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
            # The kernel returns all values that are read later: a backward pass reads the total and
            # the statistics.
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
