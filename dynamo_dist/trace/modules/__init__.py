"""Modules and what stands around their forward: hooks, DDP, FSDP2."""
