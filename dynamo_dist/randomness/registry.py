"""The changes in torch that concern random operators."""

from __future__ import annotations

from dynamo_dist.randomness import _torch, replicas, shards


def changes() -> list[_torch.Change]:
    """Everything to apply, in order; nothing is applied here."""
    return [
        *_torch.save_states_before_objects(),
        *_torch.draw_once(),
        *shards.changes(),
        *replicas.changes(),  # sees torch's operator, which shards replace
    ]
