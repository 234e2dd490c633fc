"""Eager, stock Inductor and ours on one model, side by side, on every rank."""

from dynamo_dist.benchmark.records import Comparison, RankResult, Simulated, VariantResult
from dynamo_dist.benchmark.run import compare

__all__ = ["Comparison", "RankResult", "Simulated", "VariantResult", "compare"]
