"""What a package of yours may bring: a pass, a topology, a strategy for an operator, a tracker hook."""
