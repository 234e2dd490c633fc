"""Regions that could be cut: from each input of a graph, along each of its dimensions, as far as rules carry."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from inductor_passes.split.region import Positions, Region, spread
from inductor_passes.split.rules.places import Cut, fits


def regions(graph: fx.Graph, parts: int) -> Iterator[Region]:
    """Yield the regions that hold a launch, inputs that are used first in front.

    An input that an earlier region reads in the same parts would lead to a piece of that region, and is left out.
    """
    positions = Positions(graph)
    inputs = [node for node in graph.find_nodes(op="placeholder") if node.users]
    inputs.sort(key=lambda node: min(positions.of[user] for user in node.users))
    known: set[tuple[fx.Node, Cut]] = set()
    for node in inputs:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not all(isinstance(s, int) for s in value.shape):
            continue
        for dim in range(value.dim()):
            cut = Cut(dim)
            if (node, cut) in known or not fits(cut, tuple(value.shape), parts):
                continue
            region = spread(positions, node, cut, parts)
            known.update(item for step in region.steps.values() for item in step.reads.items())
            if region.launches:
                yield region
