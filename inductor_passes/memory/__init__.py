"""Decide what a training step keeps from forward to backward, within bytes that the user gives.

``budget.py`` reads the option. ``min_cut.py`` finds what to keep at a price of memory,
``keep_within_budget.py`` finds the price, and marks the graph.
"""
