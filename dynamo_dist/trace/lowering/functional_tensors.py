"""What functional collectives return: in a graph a plain tensor, in eager mode one that waits when it is used.

The tensor of a graph has been waited for, so that a program that asks it to wait gets the tensor itself.
"""

from __future__ import annotations

from typing import Any

import torch

from dynamo_dist.torch_compat import dtensor_specs, dynamo_building, dynamo_dtensors, dynamo_modules
from dynamo_dist.torch_compat.patching import Change

_METHODS = ("trigger_wait", "wait")  # of AsyncCollectiveTensor


def _has_been_waited_for(tracker: Any) -> bool:
    """Return whether it tracks what a functional collective returned, or a view of that."""
    node = dynamo_building.realized(tracker).as_proxy().node
    wait = torch.ops._c10d_functional.wait_tensor
    value: Any
    base: Any
    while node.target not in (wait, wait.default):
        value = node.meta.get("example_value")
        of = node.args[0] if node.args else None
        base = getattr(of, "meta", {}).get("example_value")
        tensors = isinstance(value, torch.Tensor) and isinstance(base, torch.Tensor)
        if not tensors or not dtensor_specs.may_overlap(value, base):
            return False
        node = of
    return True


def _itself(tx: Any, tracker: Any, args: Any) -> Any:
    return tracker if _has_been_waited_for(tracker) else None


def _has_attribute(tracker: Any, cls: type, name: str) -> bool | None:
    return True if name in _METHODS and _has_been_waited_for(tracker) else None


def _attribute(tx: Any, tracker: Any, name: str) -> Any:
    if name == "completed" and _has_been_waited_for(tracker):
        return dynamo_building.build(tx, True)
    return None


def changes() -> list[Change]:
    """List the changes that enabling makes for what functional collectives return."""
    return [
        *(change for name in _METHODS for change in dynamo_modules.on_tensor_method(name, _itself)),
        *dynamo_dtensors.on_tensor_attributes(_has_attribute, _attribute),
    ]
