"""Work as microseconds on a machine: compute by a roofline, collectives by alpha and beta."""
