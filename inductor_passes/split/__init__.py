"""Cut regions of a graph into parts that run one after another, so that one computes while
another's collective runs.

A part is a shard on a dimension of a mesh whose ranks run one after another: ``rules/rule.py``
says how a value lies in parts, ``rules`` how an operator is computed in them, ``region.py`` how far
that reaches.
"""
