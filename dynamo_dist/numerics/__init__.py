"""Distributed numbers against those of one device, operator by operator and for a whole step."""

from dynamo_dist.numerics.step import Report as Report
from dynamo_dist.numerics.step import verify as verify
