"""Pause or slow Python's collector of cycles where there is little for it to find."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

# Objects that are made before it looks at the youngest; 700 by default, or 2,000.
_RARELY = 10_000
_lock = threading.Lock()
_slowed: list[tuple[int, int, int]] = []  # what was before, once for each block


@contextlib.contextmanager
def without_cycle_collection() -> Iterator[None]:
    """Pause it: passes make millions of small objects, and of those in cycles only some copies
    of graphs are garbage.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def rare_cycle_collection() -> Iterator[None]:
    """Slow it, in all threads until the last of them has left its block: a compile looks less
    often, and its garbage still goes.
    """
    with _lock:
        _slowed.append(_slowed[0] if _slowed else gc.get_threshold())
        if 0 < _slowed[0][0] < _RARELY:
            gc.set_threshold(_RARELY, *_slowed[0][1:])
    try:
        yield
    finally:
        with _lock:
            before = _slowed.pop()
            if not _slowed:
                gc.set_threshold(*before)
