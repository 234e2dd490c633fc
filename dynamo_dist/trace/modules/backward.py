"""``loss.backward()`` inside a compiled function: refused, with the way that works.

Torch can be told to trace it, as gradients that the graph computes and accumulates. What eager's engine
does besides is then left out: the hooks of parameters, through which DDP and FSDP2 reduce; and the
gradients of DTensors come in other layouts than eager's.
"""

from __future__ import annotations

from typing import NoReturn

from dynamo_dist.torch_compat import dynamo_building, dynamo_modules
from dynamo_dist.torch_compat.patching import Change


def refuse() -> NoReturn:
    """Break the graph at the call."""
    dynamo_building.graph_break(
        "backward() inside a compiled function",
        "Tensor.backward",
        "The compiled forward brings its own backward graph, and eager's engine, with the hooks of "
        "parameters, runs outside of graphs.",
        "Return the loss and call backward outside, where it runs the compiled backward graph:\n"
        "    loss = compiled(x)\n"
        "    loss.backward()",
    )


def backward_changes() -> list[Change]:
    """List the changes that enabling makes for ``backward()`` inside a compiled function."""
    return dynamo_modules.on_backward(refuse)
