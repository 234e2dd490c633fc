"""Peak memory of a program given as plain numbers: bytes brought to life, bytes freed after their last use."""

from __future__ import annotations

from collections.abc import Sequence


def peak_of_values(fresh_bytes: Sequence[int], uses: Sequence[Sequence[int]]) -> int:
    """Most bytes alive at one entry of a program.

    ``fresh_bytes[i]``: bytes that entry i brings to life, 0 for a view or an input. ``uses[i]``: entries
    whose bytes must still be there while i runs. Bytes are freed after their last use.
    """
    last = list(range(len(fresh_bytes)))
    for i, used in enumerate(uses):
        for owner in used:
            last[owner] = i
    return peak_of_lifetimes(fresh_bytes, last)


def peak_of_lifetimes(fresh_bytes: Sequence[int], last_use: Sequence[int]) -> int:
    """The same where entry i's bytes are freed after entry ``last_use[i]``, at the earliest i."""
    return max(live_bytes(fresh_bytes, last_use), default=0)


def live_bytes(fresh_bytes: Sequence[int], last_use: Sequence[int]) -> list[int]:
    """Bytes alive while each entry runs."""
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
