"""Stock's trackers of groups, meshes and placements: opaque types, or classes of their own up to 2.11."""

from __future__ import annotations

from typing import Any

import torch._dynamo.guards as _guards
import torch.compiler.config as _compiler_config
from torch._dynamo.variables.base import VariableTracker
from torch._library.fake_class_registry import FakeScriptObject
from torch._logging._internal import log_registry as _log_registry

from dynamo_dist.torch_compat.probing import _optional


def probes() -> dict[str, bool]:
    """Tell what this torch has, by the names that ``doctor`` explains."""
    entry = _compiler_config._config["cache_key_tag"]  # type: ignore[attr-defined]
    return {
        "opaque_types": HAS_OPAQUE_TYPES,
        "custom_class_names": _OPAQUE is not None and _OPAQUE.__name__.startswith("CustomClass"),
        "getattro_protocol": HAS_GETATTRO_PROTOCOL,
        "config_per_thread": hasattr(entry.user_override, "get"),
        "subgraph_reuse": hasattr(_guards, "GUARD_VALUE_DISPATCH"),
        "short_log_names": _log_registry.is_log("dist"),
    }


# One opaque-object tracker for all three from 2.12 on (renamed in 2.14), a class for each in 2.11.
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
_DISTRIBUTED = "torch._dynamo.variables.distributed"
_STOCK_GROUP = _optional(_DISTRIBUTED, "ProcessGroupVariable")
_STOCK_MESH = _optional(_DISTRIBUTED, "DeviceMeshVariable")
_STOCK_PLACEMENT = _optional(_DISTRIBUTED, "PlacementVariable")
_STOCK_PLACEMENT_CLASS = _optional(_DISTRIBUTED, "PlacementClassVariable")
HAS_OPAQUE_TYPES = _STOCK_GROUP is None
HAS_GETATTRO_PROTOCOL = hasattr(VariableTracker, "tp_getattro_impl")


def unwrap(value: Any) -> Any:
    """The object that Dynamo's stand-in for an opaque object stands for; other values as they are."""
    return value.real_obj if isinstance(value, FakeScriptObject) else value


_MESH_MEMBERS_OF_2_11 = frozenset(
    "ndim device_type mesh_dim_names size get_coordinate get_rank get_local_rank get_group _flatten "
    "_is_current_rank_part_of_mesh _get_or_create_default_group _sym_get_coordinate".split()
)
TRACES_PLACEMENTS = HAS_OPAQUE_TYPES  # their methods, and graphs hold them; up to 2.11 neither
