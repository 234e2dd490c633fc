"""``copy.copy`` and ``copy.deepcopy`` of a traced DTensor.

Stock traces how the class is pickled, and ends inside its mesh.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat import dynamo_building, dynamo_dtensors, dynamo_trackers
from dynamo_dist.torch_compat.patching import Change


def deep(tensor: DTensor) -> Any:
    """Traced: a copy with memory of its own."""
    return tensor.detach().clone()


def shallow(tensor: DTensor) -> Any:
    """Traced: another DTensor of the same memory."""
    return tensor.detach()


def _answer(function: Callable[[DTensor], Any]) -> Callable[..., Any]:
    def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if len(args) != 1 or kwargs or not dynamo_dtensors.is_tensor_of(args[0], DTensor):
            return None
        if dynamo_dtensors.requires_grad(args[0]):
            dynamo_building.graph_break(
                "Copy of a DTensor that requires gradients",
                "copy.deepcopy(x)",
                "The copy would be a leaf that collects gradients, which a compiled function cannot make.",
                "Copy it outside the compiled function, or copy x.detach().",
            )
        return dynamo_building.call_traced(tx, function, args, {})

    return answer


def copies_changes() -> list[Change]:
    """List the changes that enabling makes for copies."""
    return [
        *dynamo_trackers.on_function(copy.deepcopy, _answer(deep)),
        *dynamo_trackers.on_function(copy.copy, _answer(shallow)),
    ]
