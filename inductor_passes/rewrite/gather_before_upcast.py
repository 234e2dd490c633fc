"""Move the narrow values, and widen them where they arrive."""

from __future__ import annotations

import torch
from torch import fx

from inductor_passes.base import PassStats
from inductor_passes.graph.collectives import input_tensors, kind, launches, output_bytes, waits_of
from inductor_passes.graph.edit import (
    CAST,
    PLACING,
    again,
    aten,
    chain_above,
    emit,
    erase_unused,
    replace,
    tensor,
)
from inductor_passes.rewrite.base import Rewrite

# Collectives that place elements and compute nothing.
MOVING_KINDS = ("all_gather", "all_to_all", "broadcast")


class GatherBeforeUpcast(Rewrite):
    """Gather the value before its upcast and cast the gathered one: bfloat16 to float32 halves the bytes.

    Looks through views, copies and zero padding between cast and launch: with uneven shards some
    ranks pad and others do not, and all must decide alike.

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
                moved = emit(graph, launch.target, (source, *launch.args[1:]), launch)  # type: ignore[arg-type]
            for wait in waits_of(launch):
                with graph.inserting_before(wait):
                    arrived = emit(graph, wait.target, (moved,), wait)  # type: ignore[arg-type]
                    wide = emit(graph, CAST, (arrived, cast.args[1]), cast)
                replace(wait, wide, self.name)
            saved += output_bytes(chain[0]) - output_bytes(source)
            count += 1
            for wait in waits_of(launch):
                graph.erase_node(wait)
            erase_unused(graph, [launch, chain[0]])
        return PassStats(count > 0, {"launches_narrowed": count, "bytes_saved": saved})


def widening_above(launch: fx.Node) -> list[fx.Node] | None:
    """Return what stands between a launch and the cast to a wider type that it moves the result of, and the cast, last."""
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
