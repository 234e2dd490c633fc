"""Order, bucket and bound the communication of a whole graph; the solver imports no torch."""
