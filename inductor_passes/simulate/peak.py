"""Peak memory of a program given as plain numbers: bytes brought to life, bytes freed after their last use."""

from __future__ import annotations

from collections.abc import Sequence


def live_bytes(fresh_bytes: Sequence[int], last_use: Sequence[int]) -> list[int]:
    """Bytes alive while each entry of a program runs.

    ``fresh_bytes[i]``: bytes that entry i brings to life, 0 for a view or an input; they are freed after entry
    ``last_use[i]``, at the earliest i.
    """
    freed = [0] * len(fresh_bytes)
    for size, i in zip(fresh_bytes, last_use, strict=True):
        freed[i] += size
    live = 0
    during = []
    for fresh, gone in zip(fresh_bytes, freed, strict=True):
        live += fresh
        during.append(live)
        live -= gone
    return during
