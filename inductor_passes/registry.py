"""Registry of passes, and the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from inductor_passes.cost.topology import forget_topologies, registered_topologies
from inductor_passes.errors import OptionError
from inductor_passes.fused import FUSIONS
from inductor_passes.graph_pass import GraphPass, PassContext
from inductor_passes.plugins import load_plugins
from inductor_passes.rewrite import REWRITES
from inductor_passes.schedule.schedule_pass import ScheduleGraph
from inductor_passes.split.split_pass import SplitRegions

PLUGIN_GROUP = "inductor_passes.plugins"
# Read top to bottom: this is the order.
DEFAULT_PASSES: tuple[type[GraphPass], ...] = (
    *REWRITES,
    SplitRegions,
    ScheduleGraph,
    *FUSIONS,
)

Registered = type[GraphPass] | GraphPass

_third_party: list[tuple[Registered, str | None, str | None]] = []
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
    is_pass = isinstance(pass_, GraphPass) or (
        isinstance(pass_, type) and issubclass(pass_, GraphPass)
    )
    if not is_pass or not getattr(pass_, "name", ""):
        raise OptionError(
            f"register() got {pass_!r}, which is not a pass.",
            "A pass is a subclass or an instance of inductor_passes.GraphPass with a name.",
            "Derive from inductor_passes.GraphPass and set `name`.",
        )
    if any(known is pass_ for known, _, _ in _third_party):
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
    _third_party.append((pass_, before, after))
    return pass_


def unregister(pass_: Registered) -> None:
    """Undo ``register``. Unknown passes are ignored."""
    _third_party[:] = [entry for entry in _third_party if entry[0] is not pass_]


def ordered_passes() -> list[Registered]:
    """Default and registered passes in the order they run."""
    read_plugins()
    order: list[Registered] = list(DEFAULT_PASSES)
    for pass_, before, after in _third_party:
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
    """Load the entry points once. A plugin that fails is reported and left out."""
    global _plugins_read  # noqa: PLW0603 - a process reads its entry points once
    if _plugins_read:
        return
    _plugins_read = True
    _plugin_failures.update(load_plugins(PLUGIN_GROUP, _use, _save))


def _use(plugin: Any) -> None:
    """A pass is registered at the end; a function is called, and registers what it has where it
    wants.
    """
    is_pass = isinstance(plugin, type) and issubclass(plugin, GraphPass)
    if is_pass or isinstance(plugin, GraphPass):
        register(plugin)
    else:
        plugin()


def _save() -> Callable[[], None]:
    passes, topologies = list(_third_party), registered_topologies()

    def restore() -> None:
        _third_party[:] = passes
        forget_topologies(but=topologies)

    return restore
