"""Narrow values before they move, if every reader narrows them after."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from inductor_passes.base import PassStats
from inductor_passes.graph.collectives import input_tensors, kind, launches, output_bytes, waits_of
from inductor_passes.graph.edit import (
    CAST,
    PLACING,
    aten,
    computed,
    emit,
    erase_unused,
    replace,
    tensor,
)
from inductor_passes.rewrite.base import Rewrite
from inductor_passes.rewrite.gather_before_upcast import MOVING_KINDS, widening_above

_UNPACKING = PLACING | {
    operator.getitem,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten.cat.default,
}


class DowncastBeforeGather(Rewrite):
    """Cast before the gather what all readers cast to one narrower type after it.

    Parameters kept in float32 and used in bfloat16 travel in half the bytes.

    Requires: a functional graph.
    Ensures:  every bit as before (a cast is elementwise and a gather moves elements); a second run
              changes nothing.
    Stats:    ``launches_narrowed``, ``bytes_saved`` (payload of this rank).
    """

    name = "downcast_before_gather"
    shows_in_plan = True

    def run(self, graph: fx.Graph) -> PassStats:
        count = saved = 0
        for launch in launches(graph):
            found = narrowing_below(launch)
            if found is None:
                continue
            between, casts = found
            source, dtype = launch.args[0], casts[0].args[1]
            with graph.inserting_before(launch):
                narrow = emit(graph, CAST, (source, dtype), casts[0])
            launch.replace_input_with(source, narrow)  # type: ignore[arg-type]
            for node in (launch, *between):
                node.meta["val"] = computed(node)
            for cast in casts:
                replace(cast, cast.args[0], self.name)  # type: ignore[arg-type]
            erase_unused(graph, casts)
            saved += output_bytes(source) - output_bytes(narrow)  # type: ignore[arg-type]
            count += 1
        return PassStats(count > 0, {"launches_narrowed": count, "bytes_saved": saved})


def narrowed_types(graph: fx.Graph) -> str:
    """Return, by number of launch, the types in which passes may move what a graph gathers in wider ones.

    They follow from what the program computes of it, as under autocast, and tell two graphs of one function apart whose
    launches read the same.
    """
    found = []
    for i, launch in enumerate(launches(graph)):
        if (casts := narrowing_below(launch)) is not None:
            found.append(f"{i} {casts[1][0].args[1]}")
        elif (chain := widening_above(launch)) is not None:
            found.append(f"{i} {tensor(chain[-1].args[0]).dtype}")  # type: ignore[union-attr]
    return ", ".join(found)


def narrowing_below(launch: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """Return what stands between a launch and the casts to one narrower type that alone read it, and these casts."""
    if kind(launch) not in MOVING_KINDS or len(list(input_tensors(launch))) != 1:
        return None
    found, wide = _casts_below(waits_of(launch)), tensor(launch.args[0])
    if found is None or wide is None:
        return None
    is_narrower = tensor(found[1][0]).dtype.itemsize < wide.dtype.itemsize  # type: ignore[union-attr]
    return found if is_narrower else None


def _casts_below(waits: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """Return the nodes between the waits and the casts that read them, in order, and the casts.

    None unless every path from a wait ends in a cast, and all casts are to one type.
    """
    casts: dict[fx.Node, None] = {}
    between: dict[fx.Node, None] = dict.fromkeys(waits)
    pending = list(waits)
    while pending:
        node = pending.pop()
        if not node.users:
            return None
        for user in node.users:
            if user.target is CAST:
                casts[user] = None
            elif user.target not in _UNPACKING:
                return None
            elif user not in between:
                between[user] = None
                pending.append(user)
    if not casts or len({cast.args[1] for cast in casts}) != 1:
        return None
    inside = set(between)
    for node in between:
        if node.target is aten.cat.default and not inside.issuperset(node.all_input_nodes):
            return None
    order = [node for node in waits[0].graph.nodes if node in inside]
    return order, list(casts)
