"""Dynamo's view of process groups, device meshes and placements while this package is enabled."""
