"""Order and costs of a graph -> timeline, exposed time, peak memory, Chrome trace.

``execution`` and ``peak`` work on plain numbers: what needs torch is looked up late.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from inductor_passes.simulate.chrome_trace import chrome_trace, joined_traces

if TYPE_CHECKING:
    from inductor_passes.simulate.timeline import Timeline, simulate

__all__ = ["Timeline", "chrome_trace", "joined_traces", "simulate"]


def __getattr__(name: str) -> object:
    if name in ("Timeline", "simulate"):
        return getattr(importlib.import_module("inductor_passes.simulate.timeline"), name)
    raise AttributeError(f"module 'inductor_passes.simulate' has no attribute {name!r}")
