"""Registry of passes, in the order in which they run, and of extensions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from typing import Any

from inductor_passes.cost.topology import forget_topologies, registered_topologies
from inductor_passes.errors import OptionError
from inductor_passes.extension import Extension
from inductor_passes.graph_pass import GraphPass, PassContext
from inductor_passes.plugins import load_features, load_plugins
from inductor_passes.rewrite import REWRITES
from inductor_passes.schedule.schedule_pass import ScheduleGraph

PLUGIN_GROUP = "inductor_passes.plugins"
# Read top to bottom: this is the order. Features and plugins register theirs next to these.
CORE_PASSES: tuple[type[GraphPass], ...] = (*REWRITES, ScheduleGraph)

# Features of this package: plugins like any other, each in a folder that can be deleted. They are
# listed here and not in setup.cfg, so that a checkout on PYTHONPATH has them too.
FEATURES = (
    EntryPoint("split", "inductor_passes.split.split_pass:register", PLUGIN_GROUP),
    EntryPoint("memory", "inductor_passes.memory.feature:register", PLUGIN_GROUP),
    EntryPoint("fused", "inductor_passes.fused.feature:register", PLUGIN_GROUP),
)

Registered = type[GraphPass] | GraphPass

# What this process has registered; unregister() takes it out.
_passes: list[tuple[Registered, str | None, str | None]] = []
_extensions: list[Extension] = []
# Plugins are read once in a process. The lock keeps a second thread from a registry half filled.
_reading = threading.RLock()
_plugins_read = False
_plugin_failures: dict[str, str] = {}


def register(
    pass_: Registered, *, before: str | None = None, after: str | None = None
) -> Registered:
    """Add a pass to every later compile: at the end, or next to the pass named.

    ``pass_`` is a ``GraphPass`` class (built with ``build(context)``) or an instance. Returns it,
    so that it works as a class decorator. Raises OptionError if the name is taken, if it is not a
    GraphPass, or if the neighbour is unknown. The same object twice is once.
    """
    if not _is_pass(pass_) or not getattr(pass_, "name", ""):
        raise OptionError(
            f"register() got {pass_!r}, which is not a pass.",
            "A pass is a subclass or an instance of inductor_passes.GraphPass with a name.",
            "Derive from inductor_passes.GraphPass and set `name`.",
        )
    if any(known is pass_ for known, _, _ in _passes):
        return pass_
    names = [p.name for p in ordered_passes()]
    if pass_.name in names:
        raise OptionError(
            f"A pass named {pass_.name!r} is registered already.",
            "Names select passes in options, so each must be unique.",
            f"Choose another name; taken are {', '.join(names)}.",
        )
    for neighbour in (before, after):
        if neighbour is not None and neighbour not in names:
            raise unknown_pass(neighbour, names)
    _passes.append((pass_, before, after))
    return pass_


def _is_pass(given: object) -> bool:
    is_class = isinstance(given, type) and issubclass(given, GraphPass)
    return is_class or isinstance(given, GraphPass)


def register_extension(extension: Extension) -> None:
    """Add an extension's options, command, log lines, cache keys and checks to every later compile.

    Raises OptionError if it is no Extension, or if its name or one of its options or commands is
    taken. The same object twice is once.
    """
    if not isinstance(extension, Extension) or not getattr(extension, "name", ""):
        raise OptionError(
            f"register_extension() got {extension!r}, which is not an extension.",
            "An extension is an instance of a subclass of inductor_passes.Extension with a name.",
            "Derive from inductor_passes.Extension and set `name`.",
        )
    others = extensions()
    if any(other is extension for other in others):
        return
    for other in others:
        shared = {extension.name} & {other.name}
        shared |= extension.options.keys() & other.options.keys()
        shared |= extension.commands.keys() & other.commands.keys()
        if shared:
            raise OptionError(
                f"The extension {extension.name!r} brings {min(shared)!r}, which the extension "
                f"{other.name!r} has registered already.",
                "Names of extensions, options and commands are unique.",
                "Choose another name.",
            )
    _extensions.append(extension)


def unregister(registered: Registered | Extension) -> None:
    """Undo ``register`` or ``register_extension``. What is not registered is ignored."""
    _passes[:] = [entry for entry in _passes if entry[0] is not registered]
    _extensions[:] = [each for each in _extensions if each is not registered]


def extensions() -> tuple[Extension, ...]:
    """Registered extensions: those of features first, then in the order of registration."""
    read_plugins()
    return tuple(_extensions)


def is_built_in(registered: Registered | Extension) -> bool:
    """Return whether a pass or an extension is of this package.

    Its sources are then in every cache key, and what it does depends on no rank.
    """
    cls = registered if isinstance(registered, type) else type(registered)
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def ordered_passes() -> list[Registered]:
    """Core and registered passes in the order they run."""
    read_plugins()
    order: list[Registered] = list(CORE_PASSES)
    for pass_, before, after in _passes:
        names = [p.name for p in order]
        if before in names:
            order.insert(names.index(before), pass_)
        elif after in names:
            order.insert(names.index(after) + 1, pass_)
        else:
            order.append(pass_)
    return order


def registered_passes() -> tuple[str, ...]:
    """The names of all passes, in order."""
    return tuple(p.name for p in ordered_passes())


def plugin_failures() -> dict[str, str]:
    """Entry points of the group ``inductor_passes.plugins`` that could not be used, with the
    reason.
    """
    read_plugins()
    return dict(_plugin_failures)


def build_passes(
    context: PassContext, names: Sequence[str] | None, disable: Sequence[str]
) -> list[GraphPass]:
    """The passes of one compile: ``names`` (all if None), in registry order, without
    ``disable``.
    """
    chosen = [
        p for p in ordered_passes() if (names is None or p.name in names) and p.name not in disable
    ]
    return [p.build(context) if isinstance(p, type) else p for p in chosen]


def unknown_pass(name: str, known: Sequence[str]) -> OptionError:
    """The error for a pass name that is not registered."""
    return OptionError(
        f"There is no pass named {name!r}.",
        "",
        f"Known passes are {', '.join(known)}; others come from inductor_passes.register() or the "
        f"entry-point group {PLUGIN_GROUP}.",
    )


def read_plugins() -> None:
    """Load features and entry points once. A plugin that fails is reported and left out."""
    global _plugins_read  # noqa: PLW0603 - a process reads its entry points once
    with _reading:
        if _plugins_read:
            return
        _plugins_read = True
        _plugin_failures.update(load_features(FEATURES, _use, save))
        _plugin_failures.update(load_plugins(PLUGIN_GROUP, _use, save))


def _use(plugin: Any) -> None:
    """A pass is registered at the end; a function is called, and registers what it has where it
    wants.
    """
    if _is_pass(plugin):
        register(plugin)
    else:
        plugin()


def save() -> Callable[[], None]:
    """Return the way back to what is registered now."""
    passes, extensions_, topologies = list(_passes), list(_extensions), registered_topologies()

    def restore() -> None:
        _passes[:] = passes
        _extensions[:] = extensions_
        forget_topologies(but=topologies)

    return restore
