"""Backends of ``torch.compile``, its lock, cache keys and counters, and a process's first
compile.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import torch
import torch._dynamo.convert_frame as _convert_frame
import torch.compiler.config as _compiler_config
from torch._dynamo.backends import registry as _backends
from torch._dynamo.utils import counters
from torch._inductor import config as _inductor_config
from torch.distributed import distributed_c10d

from dynamo_dist.torch_compat.patching import _MISSING, ConfigDefault, OwnState


def unique_graphs() -> int:
    """Graphs that Dynamo has captured in this process so far. Seen in torch 2.13 to 2.15."""
    return int(counters["stats"].get("unique_graphs", 0))


def before_first_compile(prepare: Callable[[], object]) -> None:
    """Call ``prepare`` at the first ``torch.compile`` or ``Module.compile``; both are torch's again
    before that.

    What ``prepare`` raises is raised there, and it is called at the next one again. Seen in 2.13 to
    2.15.
    """
    places: list[tuple[Any, str]] = [(torch, "compile"), (torch.nn.Module, "compile")]
    upstream = [getattr(owner, name) for owner, name in places]
    lock = threading.RLock()

    def waiting(owner: object, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def compile(*args: object, **kwargs: object) -> Any:
            with lock:
                is_in_place = getattr(owner, name) is compile
                if run in _awaited:
                    run()
            # What ``prepare`` may have put there; not what somebody has put around this function.
            return (getattr(owner, name) if is_in_place else function)(*args, **kwargs)

        return compile

    ours = [
        waiting(owner, name, function)
        for (owner, name), function in zip(places, upstream, strict=True)
    ]

    def put(new: list[Any], old: list[Any]) -> None:
        for (owner, name), function, before in zip(places, new, old, strict=True):
            if getattr(owner, name) is before:
                setattr(owner, name, function)

    def run() -> None:
        _awaited.remove(run)
        put(upstream, ours)
        try:
            prepare()
        except BaseException:
            put(ours, upstream)
            _awaited.append(run)
            raise

    put(ours, upstream)
    _awaited.append(run)


# What waits for the first compile; the last one asked for stands before the others.
_awaited: list[Callable[[], None]] = []


def begin_to_compile() -> None:
    """Do now what waits for the first ``torch.compile``."""
    while _awaited:
        _awaited[-1]()


def compile_by_default_with(backend: str) -> None:
    """Have ``torch.compile`` use ``backend`` where a program names none, for the rest of the
    process.
    """
    torch.compiler.set_default_backend(backend)


def observe_inductor(observer: object) -> None:
    """Have Inductor call ``observer`` after its passes on each graph.

    If the program sets such a pass itself, ``observer`` is not called.
    """
    # Of every thread: backward graphs may be compiled in another one.
    ConfigDefault(_inductor_config, "post_grad_custom_post_pass", observer).apply()


def meeting_point() -> str:
    """``HOST:PORT`` of the store that the process group's ranks met at; "" if it is none over TCP.

    ``_get_default_store`` is in 2.13 to 2.15.
    """
    if not distributed_c10d.is_initialized():
        return ""
    store: Any = distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return f"{store.host}:{store.port}" if hasattr(store, "port") else ""


def peak_device_bytes() -> dict[str, int]:
    """Most memory that tensors took on each accelerator that this process uses."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    return {
        f"cuda:{index}": peak
        for index in range(torch.cuda.device_count())
        if (peak := torch.cuda.max_memory_allocated(index))
    }


class CacheKeyTag:
    """Append ``digest`` to ``torch.compiler.config.cache_key_tag``, for every thread.

    The tag is part of the keys of torch's compile caches. A value set in a thread is seen in that
    thread alone, while backward graphs may be compiled in another one: so it is the default that
    changes, and besides it the value of this thread if it had one. Seen in 2.13 to 2.15.
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
    """Take back what another thread has registered while this one was loading: upstream refuses a
    second.

    ``_COMPILER_FNS`` was seen in 2.13 to 2.15.
    """
    _backends._COMPILER_FNS.pop(name, None)


# Dynamo holds this lock while it traces: under it no table changes in the middle of a trace, and
# two threads cannot enable and disable at once.
compile_lock = _convert_frame.compile_lock
