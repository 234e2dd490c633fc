"""What every example ends with: eager, upstream and ours side by side, and one line that sums it
up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import dynamo_dist
from dynamo_dist.numerics import Comparison
from inductor_passes.testing import leave_process

TOPOLOGY = "h100x8"


def show(model: Callable[..., Any], inputs: Any, title: str, **options: Any) -> Comparison:
    """Compare on all ranks; rank 0 prints the table, then breaks, exposed share and equality."""
    found = dynamo_dist.compare(model, inputs, steps=3, options={"topology": TOPOLOGY}, **options)
    if dist.get_rank() == 0:
        ours = found.variants["ours"]
        before, after = ours.exposed_us
        print(found)
        print(
            f"{title}: {ours.graph_breaks} graph breaks, exposed {before:.0f} -> {after:.0f} us "
            f"(simulated, {TOPOLOGY}): {'equal' if found.ok else 'DIFFERENT'}",
            flush=True,
        )
    return found


def leave(*comparisons: Comparison) -> None:
    """End the rank; the exit status is 1 if a comparison differs or ours broke a graph."""
    leave_process(0 if all(each.ok for each in comparisons) else 1)
