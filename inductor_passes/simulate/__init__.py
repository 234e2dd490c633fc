"""Order and costs of a graph -> timeline, exposed time, peak memory, Chrome trace.

``execution`` and ``peak`` work on plain numbers; names are looked up late so that they import no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inductor_passes.simulate.chrome_trace import chrome_trace as chrome_trace
    from inductor_passes.simulate.timeline import Timeline as Timeline
    from inductor_passes.simulate.timeline import simulate as simulate

_HOME = {"Timeline": "timeline", "chrome_trace": "chrome_trace", "simulate": "timeline"}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"inductor_passes.simulate.{_HOME[name]}"), name)
    raise AttributeError(f"module 'inductor_passes.simulate' has no attribute {name!r}")
