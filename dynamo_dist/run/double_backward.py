"""A gradient of a gradient, both asked for outside of the compiled function: refused, with the way that works.

A compiled graph brings one backward graph, which is no operation that autograd could differentiate.
"""

from __future__ import annotations

from typing import NoReturn

from dynamo_dist.errors import DTensorError
from dynamo_dist.torch_compat import aot_gradients
from dynamo_dist.torch_compat.patching import Change


def _refuse() -> NoReturn:
    raise DTensorError(
        "create_graph=True asks for gradients that can be differentiated, through a compiled function on DTensors.",
        "Its backward is a compiled graph, which has no backward of its own: what would come from there would be missing.",
        "Call torch.autograd.grad(..., create_graph=True) inside the compiled function, where it becomes part of the "
        "graph, or leave out create_graph if no gradient of the gradient is needed.",
    )


def double_backward_changes() -> list[Change]:
    """List the changes to apply while the plugin is enabled."""
    return aot_gradients.on_double_backward(_refuse)
