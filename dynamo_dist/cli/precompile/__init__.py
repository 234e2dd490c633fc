"""``python -m dynamo_dist precompile``: what a job compiles, compiled and saved before it starts."""
