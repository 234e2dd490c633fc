"""Inductor: code that it has compiled, and its tables."""
