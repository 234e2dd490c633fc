"""Hold all uses of private names of torch, by subsystem, each with a feature probe.

A docstring says in which versions a name was seen. The code here knows how to look into torch, not
when or why.
"""
