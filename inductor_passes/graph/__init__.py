"""Facts of a graph, whoever asks: collectives, memory that values share, order that must be
kept, edits.
"""
