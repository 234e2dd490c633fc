"""What Dynamo traces while the plugin is on: groups, meshes, placements, c10d's calls, DTensors,
modules.
"""
