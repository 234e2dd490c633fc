"""The changes in torch that concern modules as a whole."""

from __future__ import annotations

from dynamo_dist.config import DistConfig
from dynamo_dist.torch_compat.patching import Change
from dynamo_dist.trace.modules import (
    backward,
    backward_hooks,
    calls,
    composable,
    gradients,
    parallel,
)


def changes(config: DistConfig) -> list[Change]:
    """Everything to apply, in order; nothing is applied here."""
    return [
        *calls.changes(),
        *composable.changes(),
        *backward.changes(),
        *backward_hooks.changes(),
        *gradients.changes(),
        *parallel.changes(),
    ]
