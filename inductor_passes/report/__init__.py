"""Records of graphs for people: where they go, the logs, and the writers of reports."""
