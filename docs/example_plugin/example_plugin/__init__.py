"""What a package of yours may bring: a pass, a topology, an operator's strategy, a tracker hook."""
