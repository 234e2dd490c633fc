"""From clocks in generated code, on all ranks, to one table of times: what ran, how long, and who was slow."""
