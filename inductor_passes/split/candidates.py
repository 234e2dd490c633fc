"""Regions that could be cut: from each input of a graph, along each of its dimensions, as far as rules carry.

What is scattered or exchanged along its first dimension must hold, for each rank, a piece of every part. So an input is
also cut in as many blocks as such a group has ranks.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from inductor_passes.graph.collectives import group_size, is_launch
from inductor_passes.split.region import Positions, Region, spread
from inductor_passes.split.rules.places import Cut, fits

c10d = torch.ops._c10d_functional
_SHARING = (c10d.reduce_scatter_tensor.default, c10d.all_to_all_single.default)


def regions(graph: fx.Graph, parts: int) -> Iterator[Region]:
    """Yield the regions that hold a launch, inputs that are used first in front.

    An input that an earlier region reads in the same parts would lead to a piece of that region, and is left out.
    """
    positions = Positions(graph)
    inputs = [node for node in graph.find_nodes(op="placeholder") if node.users]
    inputs.sort(key=lambda node: min(positions.of[user] for user in node.users))
    blocks = _blocks(graph)
    known: set[tuple[fx.Node, object]] = set()
    for node in inputs:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.shape):
            continue
        for cut in (Cut(dim, outer) for dim in range(value.dim()) for outer in blocks):
            if (node, cut) in known or not fits(cut, tuple(value.shape), parts):
                continue
            region = spread(positions, node, cut, parts)
            known.update(item for step in region.steps.values() for item in step.reads.items())
            if region.launches:
                yield region


def _blocks(graph: fx.Graph) -> list[int]:
    """In how many blocks inputs are cut: one, or one for each rank of a group that shares out rows."""
    found = {
        group_size(node) for node in graph.nodes if is_launch(node) and node.target in _SHARING
    }
    return [1, *sorted(size for size in found if size > 1)]
