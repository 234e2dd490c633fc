"""Fused attention: sequences of a batch stay apart. Tokens do not: the region ends there."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from inductor_passes.graph.collectives import argument
from inductor_passes.graph.edit import aten
from inductor_passes.split.rules.places import Cut, EndsError, InParts, Place, sizes
from inductor_passes.split.rules.rule import Rule

BATCH = Cut(0)


def attention(node: fx.Node, places: Mapping[fx.Node, Place], parts: int) -> InParts:
    """Attend in a part of the batch. A mask that all sequences share is read whole."""
    if argument(node, "dropout_p"):
        raise EndsError("it draws random numbers")
    if set(places.values()) != {BATCH}:
        raise EndsError("it mixes tokens and heads: only a batch is cut")
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


RULES: dict[object, Rule] = dict.fromkeys(
    (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    ),
    attention,
)
