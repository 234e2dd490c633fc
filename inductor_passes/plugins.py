"""Other people's packages: found by entry point, switched off by name, and harmless when they
fail.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

# Names of plugins, separated by commas, that are not loaded.
OFF = "INDUCTOR_PASSES_PLUGINS_OFF"


Use = Callable[[Any], object]
# Notes what is registered, and returns the way back to it: nothing stays of a plugin that failed
# half-way.
Save = Callable[[], Callable[[], object]]


def load_plugins(group: str, use: Use, save: Save) -> dict[str, str]:
    """Load the entry points of ``group`` by name and hand each to ``use``; who failed, and why."""
    # Sorted: ranks whose installations list plugins differently must still run them in one order.
    return _load(sorted(importlib.metadata.entry_points(group=group)), use, save)


def load_features(features: Sequence[EntryPoint], use: Use, save: Save) -> dict[str, str]:
    """Load a package's own features in the same way, from folders that may be missing."""
    return _load(list(filter(_has_folder, features)), use, save)


def _load(entries: Sequence[EntryPoint], use: Use, save: Save) -> dict[str, str]:
    off = {name.strip() for name in os.environ.get(OFF, "").split(",")}
    failures = {}
    for entry in entries:
        if entry.name in off:
            log.info("The plugin %s is off, by %s.", entry.name, OFF)
            continue
        restore = save()
        try:
            use(entry.load())
        except Exception as error:  # whatever a third party does must not stop a compile
            restore()
            failures[entry.name] = f"{type(error).__name__}: {error}"
            log.warning(
                "The plugin %s (%s) could not be loaded and is left out: %s. Uninstall it, set "
                "%s=%s, or ask its author for a version that works with this torch.",
                entry.name,
                entry.value,
                failures[entry.name],
                OFF,
                entry.name,
            )
    return failures


def _has_folder(feature: EntryPoint) -> bool:
    return importlib.util.find_spec(feature.module.rpartition(".")[0]) is not None


@functools.cache
def digest_of_sources(module: str) -> str:
    """A hash over the sources of the package that ``module`` is in: its helpers count as much as
    it.

    Of a module outside any package its own source; "" where there is none, as at a prompt.
    """
    parts = module.split(".")
    prefixes = [".".join(parts[: i + 1]) for i in range(len(parts))]  # a namespace has no file
    known = (getattr(sys.modules.get(prefix), "__file__", None) for prefix in prefixes)
    path = next((Path(file) for file in known if file and Path(file).is_file()), None)
    if path is None:
        return ""
    files = [path]
    if path.name == "__init__.py":
        path = path.parent
        files = sorted(p for suffix in ("py", "json") for p in path.rglob(f"*.{suffix}"))
    hasher = hashlib.sha256()
    for file_path in files:
        hasher.update(file_path.relative_to(path.parent).as_posix().encode())
        hasher.update(file_path.read_bytes())
    return hasher.hexdigest()
