"""What every example ends with: eager, stock and ours side by side, and one line that sums it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import dynamo_dist
from dynamo_dist.benchmark.records import Comparison
from inductor_passes.testing import leave_process

TOPOLOGY = "h100x8"


def show(model: Callable[..., Any], inputs: Any, title: str, **options: Any) -> Comparison:
    """Compare on all ranks; rank 0 prints the table, then breaks, exposed share and equality."""
    found = dynamo_dist.compare(model, inputs, steps=3, topology=TOPOLOGY, **options)
    if dist.get_rank() == 0:
        ours = found.merged["ours"]
        print(found)
        exposed = ""
        if ours.simulated is not None:
            before, after = ours.simulated.exposed_us_before, ours.simulated.exposed_us_after
            exposed = f"exposed {before:.0f} -> {after:.0f} us (simulated, {TOPOLOGY}), "
        print(
            f"{title}: {ours.graph_breaks} graph breaks, {exposed}largest difference to eager "
            f"{max(ours.max_output_diff, ours.max_grad_diff):.1e}: {'equal' if found.ok else 'DIFFERENT'}",
            flush=True,
        )
    return found


def leave(*comparisons: Comparison) -> None:
    """End the rank; the exit status is 1 if a comparison differs or ours broke a graph."""
    good = all(c.ok and c.merged["ours"].graph_breaks == 0 for c in comparisons)
    leave_process(0 if good else 1)
