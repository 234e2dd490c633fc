"""Strategies by which operators run on DTensors: those that upstream lacks, or has wrong, and
yours.

``enable()`` puts them in place and ``disable()`` takes them out.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_dist.sharding.registration import Call, Row, register_rows, register_strategy

__all__ = ["Call", "Row", "register_rows", "register_strategy"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("dynamo_dist.sharding.registration"), name)
