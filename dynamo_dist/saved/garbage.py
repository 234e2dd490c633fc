"""Python's collection of cyclic garbage, which goes through every object of the process again and again."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def left_lying() -> Iterator[None]:
    """Collect no cycles in the block: what is loaded stays, and looking through it is an eighth of a loaded start."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
