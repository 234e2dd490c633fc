"""Gather narrow values: cast them before they move, or widen them where they arrive."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from inductor_passes.graph.collectives import input_tensors, kind, launches, output_bytes, waits_of
from inductor_passes.graph.edit import (
    CAST,
    PLACING,
    again,
    aten,
    chain_above,
    computed,
    emit,
    erase_unused,
    replace,
    tensor,
)
from inductor_passes.graph_pass import PassStats, Rewrite

# Collectives that place elements and compute nothing.
MOVING_KINDS = ("all_gather", "all_to_all", "broadcast")


class GatherBeforeUpcast(Rewrite):
    """Gather before an upcast, and cast what was gathered: half the bytes for bfloat16.

    The pass looks through views, copies and zero padding between cast and launch. With uneven
    shards some ranks pad and others do not, and all ranks must make the same decision.

    Requires: a functional graph.
    Ensures:  every bit as before (only casts that lose nothing); a second run changes nothing.
    Stats:    ``launches_narrowed``, ``bytes_saved`` (payload of this rank).
    """

    name = "gather_before_upcast"
    shows_in_plan = True

    def run(self, graph: fx.Graph) -> PassStats:
        count = saved = 0
        for launch in launches(graph):
            chain = widening_above(launch)
            if chain is None:
                continue
            cast = chain[-1]
            narrow = cast.args[0]
            assert isinstance(narrow, fx.Node)
            with graph.inserting_before(launch):
                source = again(graph, chain[:-1], narrow)
                moved = emit(graph, launch.target, (source, *launch.args[1:]), launch)
            for wait in waits_of(launch):
                with graph.inserting_before(wait):
                    arrived = emit(graph, wait.target, (moved,), wait)
                    wide = emit(graph, CAST, (arrived, cast.args[1]), cast)
                replace(wait, wide, self.name)
            saved += output_bytes(chain[0]) - output_bytes(source)
            count += 1
            for wait in waits_of(launch):
                graph.erase_node(wait)
            erase_unused(graph, [launch, chain[0]])
        return PassStats(count > 0, {"launches_narrowed": count, "bytes_saved": saved})


def widening_above(launch: fx.Node) -> list[fx.Node] | None:
    """Return what stands between a launch and the cast to a wider type that it moves the result
    of, and the cast, last.
    """
    if kind(launch) not in MOVING_KINDS or len(list(input_tensors(launch))) != 1:
        return None
    chain = chain_above(launch.args[0], PLACING | {aten.constant_pad_nd.default})
    if not chain or not _is_widening(chain[-1]) or any(_pads_value(n) for n in chain):
        return None
    return chain


def _is_widening(node: fx.Node) -> bool:
    """Return whether the node is a cast to a larger type that keeps every value exactly."""
    wide = tensor(node)
    if node.target is not CAST or wide is None:
        return False
    narrow = tensor(node.args[0])
    if narrow is None or narrow.dtype.itemsize >= wide.dtype.itemsize:
        return False
    return keeps_values(narrow.dtype, wide.dtype)


def keeps_values(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return whether every value of ``narrow`` is one of ``wide``."""
    if narrow.is_complex or wide.is_complex:
        return False
    if narrow is torch.bool:
        return True
    if narrow.is_floating_point:
        if not wide.is_floating_point:
            return False
        a, b = torch.finfo(narrow), torch.finfo(wide)
        return bool(a.eps >= b.eps and a.max <= b.max and a.tiny >= b.tiny)
    i = torch.iinfo(narrow)
    if wide.is_floating_point:
        return max(abs(i.min), i.max) * torch.finfo(wide).eps <= 1
    j = torch.iinfo(wide)
    return bool(j.min <= i.min and i.max <= j.max)


def _pads_value(node: fx.Node) -> bool:
    """Return whether a node pads with something other than zero, which a cast may change."""
    if node.target is not aten.constant_pad_nd.default:
        return False
    fill = node.args[2] if len(node.args) > 2 else node.kwargs.get("value", 0)
    return bool(fill != 0)


_UNPACKING = PLACING | {
    operator.getitem,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.slice.Tensor,
    aten.cat.default,
}


class DowncastBeforeGather(Rewrite):
    """Cast before a gather, where all readers cast to one narrower type after it.

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
    """Return, by number of launch, the types in which passes may move what a graph gathers in wider
    ones.

    They follow from what the program computes of it, as under autocast, and tell two graphs of one
    function apart whose launches read the same.
    """
    found = []
    for i, launch in enumerate(launches(graph)):
        if (casts := narrowing_below(launch)) is not None:
            found.append(f"{i} {casts[1][0].args[1]}")
        elif (chain := widening_above(launch)) is not None:
            found.append(f"{i} {tensor(chain[-1].args[0]).dtype}")  # type: ignore[union-attr]
    return ", ".join(found)


def narrowing_below(launch: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """Return what stands between a launch and the casts to one narrower type that alone read it,
    and these casts.
    """
    if kind(launch) not in MOVING_KINDS or len(list(input_tensors(launch))) != 1:
        return None
    found, wide = _casts_below(waits_of(launch)), tensor(launch.args[0])
    if found is None or wide is None:
        return None
    narrow = tensor(found[1][0])
    assert narrow is not None  # a cast has one result
    return found if narrow.dtype.itemsize < wide.dtype.itemsize else None


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
