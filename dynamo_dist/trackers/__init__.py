"""``trace_instead``: what is traced where a program calls a function that Dynamo cannot look
into.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_dist.tracing.hooks import trace_instead

__all__ = ["trace_instead"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("dynamo_dist.tracing.hooks").trace_instead
