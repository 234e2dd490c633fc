"""Names that a torch may lack."""

from __future__ import annotations

import importlib
from typing import Any


def _optional(module: str, *names: str) -> Any:
    """The first of ``names`` that ``module`` has; None if it has none of them."""
    found = importlib.import_module(module)
    return next((getattr(found, name) for name in names if hasattr(found, name)), None)


def _optional_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
