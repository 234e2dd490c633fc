"""How many rows an exchange is expected to bring, where only running it tells: as many as it takes away."""

from __future__ import annotations

import torch
from torch import fx

from inductor_passes.graph.collectives import argument, group_size
from inductor_passes.torch_compat.sizes import expect, size_hint


def expect_even_exchanges(graph: fx.Graph) -> None:
    """Expect of each all_to_all whose sizes are symbols that it sends every rank an equal share, and gets as much of each.

    Prices of all that is made of its rows follow from that. It is read from the graph alone, so ranks expect the same.
    """
    target = torch.ops._c10d_functional.all_to_all_single.default
    for launch in graph.find_nodes(op="call_function", target=target):
        source, ranks = launch.args[0], group_size(launch)
        value = source.meta.get("val") if isinstance(source, fx.Node) else None
        if not isinstance(value, torch.Tensor) or not value.dim() or ranks < 1:
            continue
        share = max(1, size_hint(value.shape[0]) // ranks)
        for name in ("input_split_sizes", "output_split_sizes"):
            sizes = argument(launch, name)
            for size in sizes if isinstance(sizes, (list, tuple)) else ():
                if isinstance(size, fx.Node):
                    expect(size.meta.get("val"), share)
