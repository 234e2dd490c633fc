"""Measurements made elsewhere, as entries of a topology file."""
