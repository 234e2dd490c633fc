"""Stock's tracker of groups, meshes and placements, which are opaque types."""

from __future__ import annotations

from typing import Any

from torch._dynamo.variables.base import VariableTracker
from torch._library.fake_class_registry import FakeScriptObject
from torch._logging._internal import log_registry as _log_registry

from dynamo_dist.torch_compat.probing import _optional


def probes() -> dict[str, bool]:
    """Tell what this torch has, by the names that ``doctor`` explains."""
    return {
        "custom_class_names": _OPAQUE is not None and _OPAQUE.__name__.startswith("CustomClass"),
        "getattro_protocol": HAS_GETATTRO_PROTOCOL,
        "short_log_names": _log_registry.is_log("dist"),
    }


# One opaque-object tracker for all three, renamed in 2.14.
_OPAQUE = _optional(
    "torch._dynamo.variables.script_object",
    "CustomClassObjectVariable",  # 2.14
    "TorchScriptObjectVariable",
)
_OPAQUE_CLASS = _optional(
    "torch._dynamo.variables.script_object",
    "CustomClassVariable",  # 2.14
    "OpaqueObjectClassVariable",
)
HAS_GETATTRO_PROTOCOL = hasattr(VariableTracker, "tp_getattro_impl")


def unwrap(value: Any) -> Any:
    """The object that Dynamo's stand-in for an opaque object stands for; other values as they are."""
    return value.real_obj if isinstance(value, FakeScriptObject) else value
