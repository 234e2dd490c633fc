"""Fused attention: sequences of a batch stay apart; of one sequence, each part of the queries sees
the keys that it may see.

Under a causal mask part ``i`` sees keys up to its own: those of the parts before it all, of its own
the causal ones. The two results are put together by the sums of exponentials that the kernel
returns beside them, as attention over a ring of ranks does (Liu et al., Ring Attention, 2023).
Gradients of keys and values are sums over the parts that see them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import CAST, aten
from inductor_passes.split.rules.rule import (
    Cut,
    EndsError,
    InParts,
    Layouts,
    Maker,
    Rule,
    sizes,
)

BATCH, TOKENS = Cut(0), Cut(2)  # of [batch, heads, tokens, width]
_FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def attention(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Attend in a part of the batch, or for a part of the queries. A mask that all sequences
    share is read whole.
    """
    # Chunks would draw other numbers than the whole.
    if argument(node, "dropout_p"):
        raise EndsError("it draws random numbers")
    found = set(layouts.values())
    if found == {TOKENS}:
        return _by_queries(node)
    if found != {BATCH}:
        raise EndsError(
            "it mixes tokens and heads: only a batch is cut, or the tokens one after another"
        )
    batch = sizes(node.args[0])[0]
    reads = {}
    for source in node.all_input_nodes:
        shape = sizes(source)
        if shape and shape[0] == batch:
            reads[source] = BATCH
        elif shape and (shape[0] != 1 or source is not argument(node, "attn_mask")):
            raise EndsError("what it reads has another batch")
    made = node.meta["val"]
    if not all(isinstance(value, torch.Tensor) and value.shape[0] == batch for value in made):
        raise EndsError("it returns more than a result of each sequence")
    return InParts((BATCH,) * len(made), reads)


def _by_queries(node: fx.Node) -> InParts:
    if argument(node, "attn_mask") is not None:
        raise EndsError("its mask says which tokens see which")
    backward = node.target is _BACKWARD
    tensors = node.args[: 6 if backward else 3]
    if len({sizes(source)[:3] for source in tensors}) > 1:
        raise EndsError("its queries and keys are not of the same tokens and heads")
    reads = {source: TOKENS for source in tensors if isinstance(source, fx.Node)}
    made = len(node.meta["val"])
    return InParts((TOKENS,) * made, reads, make=_gradients if backward else _attended)


def _seen(causal: bool, i: int, parts: int) -> Iterator[tuple[int, int, bool]]:
    """Yield which keys the queries of chunk ``i`` see, as ranges of chunks.

    Each item has the first chunk, the end (exclusive), and whether attention in it is causal.
    """
    if not causal:
        yield 0, parts, False
        return
    # Causal inside the own chunk; all keys before it are seen by all its queries. Keys after it are
    # not computed at all.
    yield i, i + 1, True
    if i:
        yield 0, i, False


def _attended(made: Maker) -> list[tuple[fx.Node, ...]]:
    """Output and logarithm of the sum of exponentials of each part."""
    q, k, v = (made.parts(source) for source in made.node.args[:3])
    causal, kwargs = bool(argument(made.node, "is_causal")), made.node.kwargs
    dtype, wide = (each.dtype for each in made.node.meta["val"])
    wide = torch.promote_types(dtype, wide)  # torch before 2.13 says float32 of float64's exponents
    found: list[tuple[fx.Node, ...]] = []
    for i in range(made.count):
        several = []
        for first, end, masked in _seen(causal, i, made.count):
            keys, values = (_joined(made, each[first:end]) for each in (k, v))
            pair = made.emit(_FORWARD, (q[i], keys, values, 0.0, masked), kwargs)
            several.append(_picked(made, pair))
        (out, exponents), *more = several
        for other, its in more:
            # Two softmaxes over disjoint keys join by the weight of their sums of exponentials, as
            # in ring attention (Liu et al., 2023).
            both = _logaddexp(made, exponents, its)
            out, other = (
                made.emit(aten.mul.Tensor, (made.emit(CAST, (each, wide)), weight))
                for each, weight in (
                    (out, _weight(made, exponents, both)),
                    (other, _weight(made, its, both)),
                )
            )
            out = made.emit(CAST, (made.emit(aten.add.Tensor, (out, other)), dtype))
            exponents = both
        found.append((out, exponents))
    return found


def _logaddexp(made: Maker, one: fx.Node, other: fx.Node) -> fx.Node:
    """The logarithm of both exponentials together, of operators that need no decomposition: it
    is too late for one.
    """
    # The larger exponent is taken out first, so that neither exponential overflows.
    most = made.emit(aten.maximum.default, (one, other))
    one, other = (
        made.emit(aten.exp.default, (made.emit(aten.sub.Tensor, (each, most)),))
        for each in (one, other)
    )
    return made.emit(
        aten.add.Tensor,
        (most, made.emit(aten.log.default, (made.emit(aten.add.Tensor, (one, other)),))),
    )


def _weight(made: Maker, exponents: fx.Node, both: fx.Node) -> fx.Node:
    share = made.emit(aten.exp.default, (made.emit(aten.sub.Tensor, (exponents, both)),))
    return made.emit(aten.unsqueeze.default, (share, -1))


def _gradients(made: Maker) -> list[tuple[fx.Node, ...]]:
    """Gradients of the queries, keys and values of each part."""
    grad, q, k, v, out, exponents = (made.parts(source) for source in made.node.args[:6])
    causal, kwargs = bool(argument(made.node, "is_causal")), made.node.kwargs
    width = sizes(q[0])[2]
    found: list[list[fx.Node | None]] = [[None] * 3 for _ in range(made.count)]

    def add(part: int, which: int, one: fx.Node) -> None:
        before = found[part][which]
        found[part][which] = one if before is None else made.emit(aten.add.Tensor, (before, one))

    for i in reversed(range(made.count)):  # the last keys are seen by the last queries alone
        for first, end, masked in _seen(causal, i, made.count):
            keys, values = (_joined(made, each[first:end]) for each in (k, v))
            given = (grad[i], q[i], keys, values, out[i], exponents[i], 0.0, masked)
            of_queries, *of_seen = _picked(made, made.emit(_BACKWARD, given, kwargs))
            add(i, 0, of_queries)
            for which, one in enumerate(of_seen, 1):
                for part in range(first, end):
                    at = (part - first) * width
                    piece = (one, 2, at, at + width)
                    add(
                        part, which, made.emit(aten.slice.Tensor, piece) if end - first > 1 else one
                    )
    return [tuple(each for each in of_part if each is not None) for of_part in found]


def _picked(made: Maker, several: fx.Node) -> list[fx.Node]:
    return [made.pick(several, i) for i in range(len(several.meta["val"]))]


def _joined(made: Maker, parts: list[fx.Node]) -> Any:
    return parts[0] if len(parts) == 1 else made.emit(aten.cat.default, (parts, 2))


RULES: dict[object, Rule] = dict.fromkeys((_FORWARD, _BACKWARD), attention)
