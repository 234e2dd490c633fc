"""One input of a graph for each object, where guards say that several are the same one.

Dynamo makes an input of every place that it read a mesh from, such as each hook of a tensor parallel
style, and loads all of them for every call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from dynamo_dist.torch_compat import dynamo_building


def merge_inputs(
    gm: fx.GraphModule, inputs: Sequence[Any], known: Mapping[Any, object]
) -> list[Any]:
    """Remove placeholders of ``gm`` that hold what an earlier one holds; the inputs that are left.

    ``known``: sources that are guarded by identity, with what they are.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    if len(placeholders) != len(inputs) or not dynamo_building.inputs_follow(gm):
        return list(inputs)
    first: dict[int, fx.Node] = {}
    left = []
    for node, given in zip(placeholders, inputs, strict=True):
        source = dynamo_building.source_of_input(node)
        held = known.get(source) if source is not None else None
        kept = node if held is None else first.setdefault(id(held), node)
        if kept is node:
            left.append(given)
        else:
            node.replace_all_uses_with(kept)
            gm.graph.erase_node(node)
    if len(left) < len(inputs):
        gm.recompile()
    return left
