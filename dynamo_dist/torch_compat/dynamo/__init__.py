"""Dynamo: trackers, guards, frames."""
