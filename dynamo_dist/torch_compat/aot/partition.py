"""AOTAutograd's cut of the joint graph into forward and backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch._functorch.partitioners as _partitioners

from dynamo_dist.torch_compat.changes import Change, SetAttribute, has

_LAUNCHING = ("_c10d_functional", "_dtensor")  # namespaces of torch's ops that communicate


def keep_in_its_pass(own: str) -> list[Change]:
    """Keep launches in the pass, forward or backward, that launched them, and launch them once.

    The partitioner copies into the backward whatever it can compute there, dead launches too, and moves
    to the forward what does not depend on a gradient. What it can compute where depends on sizes, which
    are other ones on another rank. ``own`` is the namespace of our ops, which it takes for ops without
    effects. Seen in 2.13 to 2.15; where the predicates are missing nothing is changed.
    """
    parts = {"_must_be_in_forward": "forward", "_must_be_in_backward": "backward"}
    off = "launches may move from forward to backward, on this rank alone"
    if not has(_partitioners, "_has_tag_is_forward", *parts, off=off):
        return []
    return [
        SetAttribute(
            _partitioners, name, functools.partial(_kept, getattr(_partitioners, name), own, part)
        )
        for name, part in parts.items()
    ]


def _kept(stock: Callable[[Any], bool], own: str, part: str, node: Any) -> bool:
    namespace, tag = getattr(node.target, "namespace", None), node.meta.get("partitioner_tag")
    if namespace == own:
        # What an autograd function traced in its backward may bear no tag; all of the forward does.
        return (tag in ("is_forward", "must_be_in_forward")) == (part == "forward")
    if namespace in _LAUNCHING and not _partitioners.must_recompute(node):
        return tag == f"is_{part}" or stock(node)
    return stock(node)


def drop_dead_chains() -> list[Change]:
    """Let the partitioner drop the computation between dead launches, and so the launches before it.

    It copies into the backward what it can compute there, and drops the launches that are dead. What is no
    launch it keeps, dead or not, so that a launch whose result goes into a dead one would run twice. Seen
    in 2.13 to 2.15; where the predicate is missing nothing is changed.
    """
    if not has(_partitioners, "is_not_collective", off="some dead launches run"):
        return []
    stock = _partitioners.is_not_collective
    return [
        SetAttribute(
            _partitioners, "is_not_collective", lambda node: stock(node) and node.is_impure()
        )
    ]
