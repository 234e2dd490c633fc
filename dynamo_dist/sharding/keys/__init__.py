"""Calls that eager's cache of sharding decisions takes for one and the same."""
