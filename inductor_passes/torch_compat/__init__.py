"""Private names of torch, and nothing else, by torch's subsystems, each behind a feature probe.

A docstring says in which versions a name was seen. What stands here knows how to look into torch,
not when or why.
"""
