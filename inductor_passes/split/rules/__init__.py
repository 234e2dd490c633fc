"""How operators are computed in parts: a table, and what holds for all that stand in it."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from inductor_passes.split.rules import attention, collectives, dense, indexing, routing, views
from inductor_passes.split.rules.rows import Addends
from inductor_passes.split.rules.rule import (
    Cut,
    EndsError,
    InParts,
    Layouts,
    Rule,
    fits,
    has_equal,
    shape_of,
)

RULES: dict[object, Rule] = {
    **views.RULES,
    **dense.PRODUCT_RULES,
    **dense.REDUCTION_RULES,
    **indexing.RULES,
    **attention.RULES,
    **collectives.RULES,
}
# Rules that hold for parts of unequal sizes.
_UNEQUAL = frozenset(
    (
        dense.elementwise,
        dense.product,
        indexing.embedding,
        indexing.embedding_backward,
        *views.RULES.values(),
        *dense.REDUCTION_RULES.values(),
        collectives.wait,
        collectives.all_reduce,
        collectives.all_gather,
        collectives.reduce_scatter,
        collectives.coalesced,
    )
)
# What adds a part of a sum to the parts before it, in one kernel.
ADDING = dense.ADDING | indexing.ADDING


def rule_of(target: object) -> Rule:
    """Return the rule of an operator. Raises EndsError if there is none, for random and for
    writing ones.
    """
    _may_be_cut(target)
    if target in RULES:
        return RULES[target]
    if dense.is_elementwise(target):
        return dense.elementwise
    raise EndsError("it has no rule")


def _may_be_cut(target: object) -> None:
    if isinstance(target, torch._ops.OpOverload):
        # Chunks draw other numbers than the whole does, and upstream's numerics would no longer be
        # reproduced.
        if torch.Tag.nondeterministic_seeded in target.tags and target not in RULES:
            raise EndsError("it draws random numbers")
        # A later chunk would see what an earlier one has written.
        if target._schema.is_mutable:
            raise EndsError("it writes memory")


def step_of(
    node: fx.Node,
    layouts: Layouts,
    parts: int,
    whole: Collection[fx.Node] = (),
) -> InParts:
    """Return how a node is computed in parts, whose inputs lie as ``layouts`` says.

    Raises EndsError with the reason.

    ``whole``: keys by which tokens are sorted and counted whole.
    """
    if node.op != "call_function":
        raise EndsError("it is no operator")
    _may_be_cut(node.target)
    rule = None
    step = routing.step_by_token(node, layouts, parts, whole)
    if step is None:
        others = {n: layout for n, layout in layouts.items() if not isinstance(layout, Addends)}
        rule = rule_of(node.target)
        step = rule(node, others, parts)
    if isinstance(step.out, Cut):
        shape_of(node)
    for source, cut in step.reads.items():
        # Of several results the one that is picked is looked at where it is picked.
        if not isinstance(cut, Cut) or isinstance(source.meta.get("val"), (list, tuple)):
            continue
        shape = shape_of(source)
        if not fits(cut, shape, parts):
            raise EndsError(f"{cut} of {list(shape)} has no {parts} equal parts")
        if rule not in _UNEQUAL and not has_equal(cut, shape, parts):
            raise EndsError(f"{cut} of {list(shape)} has unequal parts")
    return step
