"""``torch.compiler.nested_compile_region`` of functions that are given DTensors.

Stock keeps the region as a graph of its own, which AOTAutograd runs on local tensors. Here it is traced in line, as
eager mode runs it; a region of plain tensors stays stock's.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat import dynamo_building, dynamo_calls, dynamo_dtensors, dynamo_trackers
from dynamo_dist.torch_compat.patching import Change


def in_line(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of the region's function, traced here; None leaves it to stock."""
    function, *given = args
    inputs = [*given, *kwargs.values()]
    if _holds_dtensors(dynamo_building.realized(function)) or any(
        dynamo_dtensors.holds_tensor_of(each, DTensor) for each in inputs
    ):
        return function.call_function(tx, given, kwargs)
    return None


def _holds_dtensors(function: Any) -> bool:
    module = dynamo_building.value_of(function)
    return isinstance(module, nn.Module) and any(
        isinstance(each, DTensor) for each in [*module.parameters(), *module.buffers()]
    )


def regions_changes() -> list[Change]:
    """List the changes that enabling makes for regions."""
    return (
        dynamo_trackers.on_function(dynamo_calls.CALL, in_line)
        if dynamo_calls.CALL is not None
        else []
    )
