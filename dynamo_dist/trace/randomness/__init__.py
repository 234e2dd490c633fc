"""Random operators on DTensors: replicas equal, and equal again where a checkpoint recomputes them."""
