"""Sharding of operations on DTensors."""
