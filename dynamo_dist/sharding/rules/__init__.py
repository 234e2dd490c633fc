"""Strategies of ours, by kind of operator."""
