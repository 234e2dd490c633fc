"""The entry-point group ``dynamo_dist.plugins``: strategies, tracker hooks and frame compilers of
other packages, and the features of this one.

Each entry is a function without arguments, called once, when the plugin is first enabled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

from dynamo_dist import trackers
from dynamo_dist.sharding import registration
from inductor_passes.plugins import load_features, load_plugins

if TYPE_CHECKING:
    from torch import fx

    from inductor_passes.pass_options import PassOptions

GROUP = "dynamo_dist.plugins"
# Features of this package: plugins like any other, each in a folder that can be deleted. They are
# listed here and not in setup.cfg, so that a checkout on PYTHONPATH has them too.
FEATURES = (EntryPoint("planning", "dynamo_dist.planning.feature:register", GROUP),)

Code = Callable[..., Any]
Compile = Callable[["fx.GraphModule", Sequence[Any]], Code]


@dataclass(frozen=True, slots=True)
class FrameCompiler:
    """How a plugin takes part in the compile of each Dynamo graph.

    ``compile``: gets the graph, its inputs, what compiles them otherwise, and the options; it
        returns what that made of the graph, or of another one.
    ``folder``: where its functions are that stand in for torch's dispatching and call no code of
        the user. Dynamo leaves their frames alone.
    """

    compile: Callable[[fx.GraphModule, Sequence[Any], Compile, PassOptions], Code]
    folder: str = ""


# What this process has registered, the first innermost.
frame_compilers: list[FrameCompiler] = []
# Plugins are read once in a process. The lock keeps a second thread from going on before that.
_reading = threading.RLock()
_read = _features_read = False
_failures: dict[str, str] = {}


def register_frame_compiler(compiler: FrameCompiler) -> None:
    """Let ``compiler`` take part in every later compile of a Dynamo graph; the same once."""
    if compiler not in frame_compilers:
        frame_compilers.append(compiler)


def read_plugins() -> None:
    """Call what is installed, once. A plugin that fails is reported and left out."""
    global _read  # noqa: PLW0603 - a process reads its entry points once
    with _reading:
        if _read:
            return
        _read = True
        _failures.update(load_plugins(GROUP, _use, _save))


def read_features() -> None:
    """Call the features of this package, once: before a compile, since enabling needs none."""
    global _features_read  # noqa: PLW0603 - they are read once a process
    with _reading:
        if _features_read:
            return
        _features_read = True
        _failures.update(load_features(FEATURES, _use, _save))


def plugin_failures() -> dict[str, str]:
    """Plugins that could not be used, with the reason."""
    read_plugins()
    read_features()
    return dict(_failures)


def _use(plugin: Any) -> None:
    plugin()


def _save() -> Callable[[], None]:
    # It loads all passes, which a process that compiles nothing does without.
    from inductor_passes import registry

    tables: list[dict[Any, Any]] = [registration.registered, trackers.hooked]
    before = [dict(table) for table in tables]
    compilers = list(frame_compilers)
    restore_passes = registry.save()

    def restore() -> None:
        frame_compilers[:] = compilers
        restore_passes()
        for table, saved in zip(tables, before, strict=True):
            table.clear()
            table.update(saved)

    return restore
