"""Collectives of FSDP2 and DDP as operations of a graph: gathers of parameters, averages of gradients."""
