"""Inductor passes that move communication under compute.

Importing this package changes nothing in torch and imports nothing that ``import torch`` has not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inductor_passes.cost.topology import register_topology as register_topology
    from inductor_passes.extension import Extension as Extension
    from inductor_passes.extension import Option as Option
    from inductor_passes.graph_pass import GraphPass as GraphPass
    from inductor_passes.graph_pass import Numerics as Numerics
    from inductor_passes.graph_pass import PassContext as PassContext
    from inductor_passes.graph_pass import PassStats as PassStats
    from inductor_passes.inductor.graph_module import communication_pass as communication_pass
    from inductor_passes.inductor.installed import install as install
    from inductor_passes.inductor.installed import uninstall as uninstall
    from inductor_passes.inductor.options import options as options
    from inductor_passes.pass_options import PassOptions as PassOptions
    from inductor_passes.pipeline import run_passes as run_passes
    from inductor_passes.registry import plugin_failures as plugin_failures
    from inductor_passes.registry import register as register
    from inductor_passes.registry import register_extension as register_extension
    from inductor_passes.registry import registered_passes as registered_passes
    from inductor_passes.registry import unregister as unregister

__version__ = "0.1.0"

_HOME = {
    "Extension": "extension",
    "GraphPass": "graph_pass",
    "Numerics": "graph_pass",
    "Option": "extension",
    "PassContext": "graph_pass",
    "PassOptions": "pass_options",
    "PassStats": "graph_pass",
    "communication_pass": "inductor.graph_module",
    "install": "inductor.installed",
    "options": "inductor.options",
    "plugin_failures": "registry",
    "register": "registry",
    "register_extension": "registry",
    "register_topology": "cost.topology",
    "registered_passes": "registry",
    "run_passes": "pipeline",
    "uninstall": "inductor.installed",
    "unregister": "registry",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(f"inductor_passes.{_HOME[name]}"), name)
    raise AttributeError(f"module 'inductor_passes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
