"""A graph as numbers: the problem, what a schedule of it costs, and bounds that no schedule beats. No torch."""
