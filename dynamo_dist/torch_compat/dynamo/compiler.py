"""Backends of ``torch.compile``, its lock and its cache keys."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import torch._dynamo.convert_frame as _convert_frame
import torch.compiler.config as _compiler_config
from torch._dynamo.backends import registry as _backends

from dynamo_dist.torch_compat.changes import _MISSING, OwnState


class CacheKeyTag:
    """Append ``digest`` to ``torch.compiler.config.cache_key_tag``, for every thread.

    The tag is part of the keys of torch's compile caches. A value set in a thread is
    seen in that thread alone, while backward graphs may be compiled in another one: so it is the
    default that changes, and besides it the value of this thread if it had one. Seen in 2.13 to 2.15.
    """

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def apply(self) -> None:
        entry = _compiler_config._config["cache_key_tag"]  # type: ignore[attr-defined]
        default, from_env, here = entry.default, entry.env_value_default, _override(entry)
        self.before = (default, from_env, here)
        entry.default = default + self.digest
        if isinstance(from_env, str):
            entry.env_value_default = from_env + self.digest
        if isinstance(here, str):
            _compiler_config.cache_key_tag = here + self.digest

    def undo(self) -> None:
        entry = _compiler_config._config["cache_key_tag"]  # type: ignore[attr-defined]
        default, from_env, here = self.before
        entry.default, entry.env_value_default = default, from_env
        now = _override(entry)
        if (
            isinstance(here, str) and now == here + self.digest
        ):  # else the user's own, set meanwhile
            _compiler_config.cache_key_tag = here


def _override(entry: Any) -> object:
    """Return the value that this thread set for a config entry, or torch's mark for "nothing"."""
    found: object = entry.user_override.get()
    return found


def cache_key_tag() -> str:
    """The tag as torch's caches read it in this thread."""
    return _compiler_config.cache_key_tag


class BackendEntryPoint(OwnState):
    """Make Dynamo resolve a backend's entry point again at its next naming, once undone.

    Dynamo keeps the function that an entry point gave (``_COMPILER_FNS``) and forgets the entry
    point (``_BACKENDS``). Seen in 2.13 to 2.15.
    """

    def __init__(self, entry_point: EntryPoint) -> None:
        self.entry_point = entry_point

    def apply(self) -> None:
        self.before = _backends._BACKENDS.get(self.entry_point.name, _MISSING)

    def undo(self) -> None:
        name = self.entry_point.name
        _backends._COMPILER_FNS.pop(name, None)
        if isinstance(self.before, EntryPoint):
            _backends._BACKENDS[name] = self.before
        elif name in _backends._BACKENDS:
            _backends._BACKENDS[name] = self.entry_point


def forget_backend(name: str) -> None:
    """Take back what another thread has registered while this one was loading: stock refuses a second.

    ``_COMPILER_FNS`` was seen in 2.13 to 2.15.
    """
    _backends._COMPILER_FNS.pop(name, None)


# Dynamo holds this lock while it traces: under it no table changes in the middle of a trace, and
# two threads cannot enable and disable at once.
compile_lock = _convert_frame.compile_lock
