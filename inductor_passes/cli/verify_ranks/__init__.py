"""``python -m inductor_passes verify-ranks``: do all ranks launch the same collectives in the same order?"""
