"""Machine code of the fused kernels: compiled ahead of time, read and gated; no GPU takes part."""
