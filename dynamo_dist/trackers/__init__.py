"""How Dynamo sees process groups, device meshes and placements while this package is enabled."""
