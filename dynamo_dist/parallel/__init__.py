"""Parallel modules: data parallel in the graph, and parameters registered as their local tensors."""

from dynamo_dist.parallel.data_parallel import data_parallel
from dynamo_dist.parallel.localize import localize, localized_dtensors

__all__ = ["data_parallel", "localize", "localized_dtensors"]
