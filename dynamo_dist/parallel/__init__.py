"""Data parallel whose gathers and gradient reductions are in the graph, where passes can move them."""

from dynamo_dist.parallel.data_parallel import data_parallel

__all__ = ["data_parallel"]
