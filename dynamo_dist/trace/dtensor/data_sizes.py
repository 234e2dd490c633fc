"""Operations on DTensors whose results are as large as the data says: ``nonzero``, ``unique``, ``bincount``, masks.

They break the graph: eager mode runs the operation, and the next graph gets what it returned.
"""

from __future__ import annotations

from dynamo_dist.torch_compat import dynamo_building
from dynamo_dist.torch_compat.patching import Change


def _refuse_data_sizes(operation: str) -> None:
    dynamo_building.graph_break(
        "Operation on DTensors whose result is as large as the data says",
        operation,
        "A graph needs the sizes of a DTensor, of all ranks together and of this rank's part. How large this result is, "
        "only the data tells.",
        "Use a form of a fixed size, such as torch.where(mask, x, 0) or torch.nonzero_static(x, size=n), or run the "
        "operation on x.full_tensor() or x.to_local().",
    )


def data_sizes_changes() -> list[Change]:
    """List the changes that enabling makes for sizes that only data tells."""
    return dynamo_building.on_sizes_told_by_data(_refuse_data_sizes)
