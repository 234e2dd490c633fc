"""``dynamo_dist.save`` and ``dynamo_dist.load``: a job starts from what an earlier one has compiled."""

from dynamo_dist.saved.loading import load
from dynamo_dist.saved.manifest import Artefacts
from dynamo_dist.saved.saving import save

__all__ = ["Artefacts", "load", "save"]
