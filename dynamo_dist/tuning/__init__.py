"""``dynamo_dist.tune``: schedules from what the job's own steps took."""

from dynamo_dist.tuning.session import tune

__all__ = ["tune"]
