"""The whole-graph planner: re-solve every placement that the user has not set, for least cost."""
