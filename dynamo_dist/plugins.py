"""The entry-point group ``dynamo_dist.plugins``: strategies and tracker hooks of other packages.

Each entry is a function without arguments, called once, when the plugin is first enabled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dynamo_dist.sharding import registration
from dynamo_dist.tracing import hooks
from inductor_passes.plugins import load_plugins

GROUP = "dynamo_dist.plugins"

_failures: dict[str, str] = {}
_read = False


def read_plugins() -> None:
    """Call what is installed, once. A plugin that fails is reported and left out."""
    global _read  # noqa: PLW0603 - a process reads its entry points once
    if _read:
        return
    _read = True
    _failures.update(load_plugins(GROUP, _use, _save))


def plugin_failures() -> dict[str, str]:
    """Plugins that could not be used, with the reason."""
    read_plugins()
    return dict(_failures)


def _use(plugin: Any) -> None:
    plugin()


def _save() -> Callable[[], None]:
    tables: list[dict[Any, Any]] = [registration.registered, hooks.hooked]
    before = [dict(table) for table in tables]

    def restore() -> None:
        for table, saved in zip(tables, before, strict=True):
            table.clear()
            table.update(saved)

    return restore
