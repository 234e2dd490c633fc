"""A helper of the pass: its source is part of the cache key too."""

import torch
from torch import fx


def waits_behind_launches(graph: fx.Graph) -> int:
    """How many waits stand directly behind what they wait for."""
    wait = torch.ops._c10d_functional.wait_tensor.default
    found = graph.find_nodes(op="call_function", target=wait)
    return sum(node.prev is node.args[0] for node in found)
