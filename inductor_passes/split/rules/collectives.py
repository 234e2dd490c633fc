"""Collectives: each part launches its own, on the same group."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from inductor_passes.graph.collectives import MEMBERS, argument, group_size
from inductor_passes.split.rules.rule import (
    Cut,
    EndsError,
    InParts,
    Layouts,
    Rule,
    cut_of,
    sizes,
)

c10d = torch.ops._c10d_functional


def _once(launch: fx.Node) -> None:
    """Raise EndsError for a launch that stands for several of the program's."""
    # Ranks agree on launches by the program's numbers. A chunk of a merged launch would belong to
    # several of them at once.
    if len(launch.meta.get(MEMBERS, ())) > 1:
        raise EndsError("it was merged of several launches")


def wait(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Wait for the launch of a part."""
    source, cut = cut_of(node, layouts)
    return InParts(cut, {source: cut})


def all_reduce(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Reduce elements at equal places, wherever those are."""
    _once(node)
    return wait(node, layouts, parts)


def all_gather(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Gather along dimension 0, where the block of each rank then holds a piece of every part."""
    _once(node)
    source, cut = cut_of(node, layouts)
    return InParts(_gathered(cut, group_size(node)), {source: cut})


def reduce_scatter(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Scatter along dimension 0 what holds, for each rank, a piece of every part."""
    _once(node)
    source, cut = cut_of(node, layouts)
    return InParts(_scattered(cut, group_size(node)), {source: cut})


def _reduced(cut: Cut, ranks: int) -> Cut:
    return cut


def _gathered(cut: Cut, ranks: int) -> Cut:
    if cut.dim == 0 and ranks < 1:
        raise EndsError("nobody knows how many ranks its group has")
    return Cut(cut.dim, cut.outer * (1 if cut.dim else ranks))


def _scattered(cut: Cut, ranks: int) -> Cut:
    # A rank gets one block of rows: each chunk must have a part of every rank's block.
    if cut.dim == 0 and (ranks < 1 or cut.outer % ranks):
        raise EndsError("a part does not hold the shares of all ranks")
    return Cut(cut.dim, cut.outer // (1 if cut.dim else ranks))


def coalesced(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Launch a part of each tensor; one that lies in no parts is cut along its first dimension."""
    _once(node)
    given, ranks = node.args[0], group_size(node)
    assert isinstance(given, (list, tuple))
    sources = [source for source in given if isinstance(source, fx.Node)]
    lies = _COALESCED[node.target]
    reads: dict[fx.Node, Cut] = {}
    for source in sources:
        cut = layouts.get(source, Cut(0, max(ranks, 1) if lies is _scattered else 1))
        if not isinstance(cut, Cut):
            raise EndsError("what it reads lies in unlike parts")
        reads[source] = cut
    return InParts(tuple(lies(reads[source], ranks) for source in sources), reads)


def all_to_all(node: fx.Node, layouts: Layouts, parts: int) -> InParts:
    """Exchange equal shares along dimension 0, each with a piece of every part."""
    _once(node)
    source, cut = cut_of(node, layouts)
    given, taken = argument(node, "input_split_sizes"), argument(node, "output_split_sizes")
    ranks = group_size(node)
    if cut.dim:
        return InParts(cut, {source: cut})
    even = [sizes(source)[0] // max(ranks, 1)] * ranks
    # Uneven shares follow from routed counts, for which ``routing.py`` has a rule of its own.
    if not ranks or given != even or taken != even or cut.outer % ranks:
        raise EndsError("its shares are not equal ones with a piece of every part")
    share = [even[0] // parts] * ranks
    return InParts(cut, {source: cut}, (source, share, share, *node.args[3:]))


_COALESCED: dict[object, Callable[[Cut, int], Cut]] = {
    c10d.all_reduce_coalesced.default: _reduced,
    c10d.all_gather_into_tensor_coalesced.default: _gathered,
    c10d.reduce_scatter_tensor_coalesced.default: _scattered,
}
RULES: dict[object, Rule] = {
    c10d.wait_tensor.default: wait,
    c10d.all_reduce.default: all_reduce,
    c10d.all_gather_into_tensor.default: all_gather,
    c10d.reduce_scatter_tensor.default: reduce_scatter,
    c10d.all_to_all_single.default: all_to_all,
    **dict.fromkeys(_COALESCED, coalesced),
}
