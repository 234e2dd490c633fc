"""Decomposed norms of a post-grad graph.

With ``x`` the input in float32, an RMS norm is ``x * rsqrt(mean(x * x) + eps) [* weight]`` and a layer norm
``(x - mean) * rsqrt(variance + eps) [* weight] [+ shift]``, mean and variance from one ``var_mean``; casts stand
before it and behind it where the program's type is narrower.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.graph.edit import CAST, aten, static_shape, tensor


@dataclass(frozen=True, slots=True)
class MatchedNorm:
    """A norm: its statistics ``[..., 1]``, the end of the chain, and all of its ``nodes``, the end first.

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
