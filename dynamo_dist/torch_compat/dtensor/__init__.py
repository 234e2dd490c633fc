"""DTensor: its dispatcher, strategies, placements and redistribution."""
