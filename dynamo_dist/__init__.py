"""torch.compile for distributed PyTorch: ``torch.compile(model, backend="dynamo_dist")``.

Importing this package imports no torch and changes nothing; a name is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynamo_dist.activation import disable, enable, enabled
    from dynamo_dist.diagnostics import explain
    from dynamo_dist.numerics import compare, verify
    from dynamo_dist.torch_compat.patching import is_enabled

__version__ = "0.1.0"
__all__ = [
    "compare",
    "disable",
    "enable",
    "enabled",
    "explain",
    "is_enabled",
    "verify",
]

_HOME = {
    "enable": "dynamo_dist.activation",
    "disable": "dynamo_dist.activation",
    "enabled": "dynamo_dist.activation",
    "is_enabled": "dynamo_dist.torch_compat.patching",
    "compare": "dynamo_dist.numerics",
    "explain": "dynamo_dist.diagnostics",
    "verify": "dynamo_dist.numerics",
}


def __getattr__(name: str) -> object:
    if name in ("sharding", "trackers"):
        return importlib.import_module(f"dynamo_dist.{name}")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
