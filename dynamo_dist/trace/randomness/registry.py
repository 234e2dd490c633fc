"""The changes in torch that concern random operators."""

from __future__ import annotations

from dynamo_dist.torch_compat.aot import random as random_compat
from dynamo_dist.torch_compat.changes import Change
from dynamo_dist.trace.randomness import shards


def changes() -> list[Change]:
    """Everything to apply, in order; nothing is applied here."""
    return [
        *random_compat.save_states_before_objects(),
        *random_compat.draw_once(),
        *shards.changes(),
    ]
