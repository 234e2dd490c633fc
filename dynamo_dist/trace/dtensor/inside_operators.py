"""Plain tensors that an operator makes inside, among the DTensors that it was given.

Traced, operators are taken apart that eager runs as one: ``one_hot`` compares with a range of classes,
``interpolate`` picks by indices that it computes. Torch refuses to mix these with DTensors, as it
refuses a rank's own. Where a call was given DTensors alone, they are no rank's own: they come from sizes
and numbers that all ranks have. So a call that fails for them runs once more with plain tensors as
replicas, unless it draws random numbers, which ranks would not have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat import dtensor_dispatch
from dynamo_dist.torch_compat.patching import Change

_MIXED = "got mixed torch.Tensor and DTensor"


def once_more(run: Callable[[], Any], arguments: Any) -> Any:
    """``run()``, a call with these arguments; a second time where it mixes what it makes with DTensors."""
    try:
        return run()
    except Exception as error:
        if _MIXED not in str(error) or not are_distributed(arguments):
            raise
    with dtensor_dispatch.made_tensors_are_replicas():
        return run()


def are_distributed(arguments: Any) -> bool:
    """Return whether there are tensors, all of them DTensors."""
    tensors = [
        each for each in dtensor_dispatch.tree_leaves(arguments) if isinstance(each, torch.Tensor)
    ]
    return bool(tensors) and all(isinstance(each, DTensor) for each in tensors)


def inside_operators_changes() -> list[Change]:
    """List the changes that enabling makes for the nodes that Dynamo tries out and those that AOTAutograd traces."""
    return dtensor_dispatch.around_traced_calls(once_more)
