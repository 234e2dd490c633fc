"""``torch.compiler.nested_compile_region`` of functions that are given DTensors.

Stock keeps the region as a graph of its own, which AOTAutograd runs on local tensors. Here it is traced in line, as
eager mode runs it; a region of plain tensors stays stock's.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.torch_compat.dynamo import building, dtensors, regions, trackers


def in_line(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of the region's function, traced here; None leaves it to stock."""
    function, *given = args
    inputs = [*given, *kwargs.values()]
    if _holds_dtensors(building.realized(function)) or any(
        dtensors.holds_tensor_of(each, DTensor) for each in inputs
    ):
        return function.call_function(tx, given, kwargs)
    return None


def _holds_dtensors(function: Any) -> bool:
    module = building.value_of(function)
    return isinstance(module, nn.Module) and any(
        isinstance(each, DTensor) for each in [*module.parameters(), *module.buffers()]
    )


def changes() -> list[Change]:
    """List the changes that enabling makes for regions."""
    return trackers.on_function(regions.CALL, in_line) if regions.CALL is not None else []
