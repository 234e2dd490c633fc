"""Python's collector of cycles, paused where it would look for what there is little of."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_cycle_collection() -> Iterator[None]:
    """Pause it: passes make millions of small objects, and of those in cycles only some copies of graphs are garbage."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
