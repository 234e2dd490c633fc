"""Floating-point operations of one node: matrix products, convolutions, attention; 0 for the rest.

Formulas are those of ``torch.utils.flop_counter`` (a user's own ``register_flop_formula`` counts too),
evaluated on the hints of symbolic sizes. What its registry lacks or counts wrongly is here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from inductor_passes.graph.node_kinds import loop_of
from inductor_passes.torch_compat.nodes import size_hint

log = logging.getLogger(__name__)

_PLAIN_MM = frozenset(("mm", "addmm", "bmm", "baddbmm"))
_ATTENTION = ("_scaled_dot_product", "_flash_attention", "_efficient_attention", "flex_attention")


def is_attention(node: fx.Node) -> bool:
    """Return whether ``node`` is a fused attention kernel, forward or backward."""
    return op_name(node).startswith(_ATTENTION)


def op_name(node: fx.Node) -> str:
    """``mm``, ``convolution_backward``, ``flex_attention`` ...; "" where the node calls no operator."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._opname)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name()
    return ""


def flops(node: fx.Node) -> float:
    """Multiplications and additions of one node on this rank (local shapes)."""
    target = node.target
    if loop_of(target) != "none":
        return 0  # bound by memory, and by far the most frequent
    name = op_name(node)
    if name in _PLAIN_MM:
        return 2 * math.prod(product_shape(node) or (0,))
    formula: Callable[..., Any] | None = _OWN.get(name)
    if formula is None:
        packet = target._overloadpacket if isinstance(target, torch._ops.OpOverload) else target
        formula = _registry().get(packet)
    if formula is None:
        return 0
    try:
        args, kwargs, out = concrete((node.args, dict(node.kwargs), node.meta.get("val")))
        count = formula(*args, **kwargs, out_val=out)
    except Exception:
        # A formula may be a third party's; without it the node still costs its memory traffic.
        log.debug("no flop count for %s", node.format_node(), exc_info=True)
        return 0
    if is_attention(node):
        count = count * _causal_share(node)
    return int(count)


def _registry() -> dict[Any, Callable[..., Any]]:
    # Not at the top: it logs a warning where a CUDA build has no Triton, and an import should not.
    from torch.utils.flop_counter import flop_registry

    return flop_registry


def concrete(value: Any) -> Any:
    """Nodes as their values, symbolic sizes as their hints, tensors as meta tensors."""
    if isinstance(value, fx.Node):
        return concrete(value.meta.get("val"))
    if isinstance(value, torch.Tensor):
        shape = [size_hint(size) for size in value.shape]
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt):
        return size_hint(value)
    if isinstance(value, (list, tuple)):
        return [concrete(item) for item in value]
    if isinstance(value, dict):
        return {key: concrete(item) for key, item in value.items()}
    return value


def _causal_share(node: fx.Node) -> float:
    """Part of the score matrix that a causal kernel computes: row i sees the first i + 1 columns."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return 1.0
    tensors = {}
    for position, argument in enumerate(target._schema.arguments):
        passed = (
            node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        )
        if argument.name == "is_causal" and not (
            argument.default_value if passed is None else passed
        ):
            return 1.0
        if argument.name in ("query", "key", "is_causal"):
            tensors[argument.name] = passed
    query, key = concrete(tensors.get("query")), concrete(tensors.get("key"))
    if "is_causal" not in tensors or query is None or key is None or query.dim() != 4:
        return 1.0
    rows, columns = query.shape[-2], key.shape[-2]
    full = min(rows, columns)
    seen = full * (full + 1) / 2 + max(0, rows - columns) * columns
    return seen / (rows * columns) if rows and columns else 1.0


def _mm(a: torch.Tensor, b: torch.Tensor, *_: object, **__: object) -> int:
    """[m, k] x [k, n], or a batch of either side; grouped products count each row of ``a`` once."""
    if a.dim() == 2 and b.dim() == 2:
        return 2 * a.shape[0] * a.shape[1] * b.shape[1]
    if a.dim() == 3 and b.dim() == 3:
        return 2 * a.shape[0] * a.shape[1] * a.shape[2] * b.shape[2]
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1]


def product_shape(node: fx.Node) -> tuple[int, int, int, int] | None:
    """Batch, m, k and n of [m, k] x [k, n] for mm, addmm, bmm and baddbmm; None for every other node.

    Almost all products of a graph, so read without meta tensors.
    """
    if op_name(node) not in _PLAIN_MM:
        return None
    shapes = []
    for source in node.args[-2:]:
        value = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(value, torch.Tensor):
            return None
        shapes.append([size_hint(size) for size in value.shape])
    *batch, m, k = shapes[0]
    return math.prod(batch), m, k, shapes[1][-1]


def _second_mm(_bias: object, a: torch.Tensor, b: torch.Tensor, *_: object, **__: object) -> int:
    return _mm(a, b)


def _mv(a: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * a.numel()


def _second_mv(_bias: object, a: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * a.numel()


def _linear(x: torch.Tensor, weight: torch.Tensor, *_: object, **__: object) -> int:
    return 2 * x.numel() * weight.shape[0]


def _attention(*args: object, **kwargs: object) -> float:
    formula = _registry()[torch.ops.aten._scaled_dot_product_flash_attention]
    return cast(float, formula(*args[:3], out_val=kwargs["out_val"]))


def _attention_backward(*args: object, **kwargs: object) -> float:
    formula = _registry()[torch.ops.aten._scaled_dot_product_flash_attention_backward]
    return cast(float, formula(*args[:4], out_val=kwargs["out_val"]))


def _convolution_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    _bias: object,
    _stride: object,
    _padding: object,
    _dilation: object,
    transposed: bool,
    _output_padding: object,
    _groups: int,
    output_mask: list[bool],
    **_: object,
) -> int:
    """Gradients of input and weight cost what the forward does, each.

    The stock formula forgets that groups divide the weight's gradient.
    """
    spatial = (x if transposed else grad).shape[2:]
    forward = 2 * grad.shape[0] * math.prod(spatial) * weight.numel()
    return forward * (bool(output_mask[0]) + bool(output_mask[1]))


_OWN: dict[str, Callable[..., float]] = {
    "_int_mm": _mm,
    "_grouped_mm": _mm,
    "_scaled_grouped_mm": _mm,
    "_scaled_grouped_mm_v2": _mm,
    "_scaled_mm_v2": _mm,
    "_addmm_activation": _second_mm,
    "mv": _mv,
    "addmv": _second_mv,
    "dot": _mv,
    "vdot": _mv,
    "linear": _linear,
    "convolution_backward": _convolution_backward,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
}
