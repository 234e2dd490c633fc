"""Check the options that users give, and split them from Inductor's own."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from inductor_passes import order_pinning, registry
from inductor_passes.cost import load_topology
from inductor_passes.errors import OptionError
from inductor_passes.extension import Option
from inductor_passes.graph_pass import ScheduleOptions
from inductor_passes.torch_compat import inductor as config

COMPILES = ("folder", "each", "shared")
# What ``disable`` takes beside passes.
_switches = [order_pinning.NAME]


def register_switch(name: str) -> None:
    """Let ``disable`` take ``name``, for something of a backend's that is no pass."""
    if name not in _switches:
        _switches.append(name)


def _known_names() -> tuple[str, ...]:
    return (*registry.registered_passes(), *_switches)


@dataclass(frozen=True, slots=True)
class PassOptions:
    """Options that a user chose.

    passes: names of the passes to run; None for all. Passes that change numbers beyond the order of
        sums run only if named here.
    disable: names of passes to leave out. ``pin_order`` and the switches of a backend have names
        too.
    topology: a shipped name or a path to JSON; None chooses by the device of the tensors.
    report: a folder for report.html, report.json and trace.json; None writes none.
    schedule: options of the scheduler (``ScheduleOptions``); or ``off`` to leave order to Inductor.
    compile: who compiles a graph that several ranks have. One for all that share its cache
        ``folder``; one for the whole job (``shared``), whose store brings it to other folders; or
        ``each`` for itself.
    exact: only passes that keep every bit.

    ``extra``: options of extensions, by name, where they are not their default. Users give them
    beside the others.
    """

    passes: tuple[str, ...] | None = None
    disable: tuple[str, ...] = ()
    topology: str | None = None
    report: str | None = None
    schedule: ScheduleOptions | str = field(default_factory=ScheduleOptions)
    compile: str = "folder"
    exact: bool = False
    # A mapping has no hash; equal options have equal hashes without it.
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        known = _known_names()
        for name in (*(self.passes or ()), *self.disable):
            if name not in known:
                raise registry.unknown_pass(name, known)
        if not isinstance(self.schedule, ScheduleOptions):
            _one_of("schedule", self.schedule, ("off", {"bucket": True}))
        _one_of("compile", self.compile, COMPILES)
        object.__setattr__(self, "extra", self._checked_extra())
        if self.topology is not None:
            load_topology(self.topology)

    def _checked_extra(self) -> dict[str, Any]:
        """Options of extensions without those at their default: who has no extension and who does
        not use it have the same options, and the same caches.
        """
        known = extra_options()
        found = {}
        for name, value in self.extra.items():
            if name not in known:
                raise _unknown_option(name)
            kept = known[name].check(value, self)
            if kept != known[name].default:
                found[name] = kept
        return found

    def parts(self) -> dict[str, str]:
        """Return these options by name, as far as they change a compiled graph. ``report`` and
        ``compile`` do not.
        """
        names = (name for name in CORE_KEYS if name not in ("report", "compile"))
        own = {name: repr(getattr(self, name)) for name in names}
        return own | {name: repr(self.extra[name]) for name in sorted(self.extra)}

    def digest(self) -> str:
        """Return the same as one text."""
        return repr(self.parts())

    def updated(self, other: PassOptions, names: Collection[str]) -> PassOptions:
        """Return these options, with those of ``names`` as ``other`` has them."""
        extra = {name: value for name, value in self.extra.items() if name not in names}
        extra |= {name: value for name, value in other.extra.items() if name in names}
        own = {name: getattr(other, name) for name in CORE_KEYS if name in names}
        return replace(self, **own, extra=extra)


CORE_KEYS = tuple(field.name for field in fields(PassOptions) if field.name != "extra")


def extra_options() -> dict[str, Option]:
    """Options of extensions, by name. A name of the core's stays the core's."""
    return {
        name: option
        for extension in registry.extensions()
        for name, option in extension.options.items()
        if name not in CORE_KEYS
    }


def own_keys() -> tuple[str, ...]:
    """Names of all options that are ours or an extension's, and not Inductor's."""
    return (*CORE_KEYS, *extra_options())


def _unknown_option(name: str) -> OptionError:
    return OptionError(
        f"Unknown option {name!r}.",
        f"Ours are {', '.join(own_keys())}; every key of Inductor's configuration works too.",
        "See torch._inductor.list_options() for those.",
    )


def split(given: Mapping[str, Any], mode: str | None = None) -> tuple[PassOptions, dict[str, Any]]:
    """Our options and Inductor's, from one mapping, on top of those of ``mode``. Raises
    OptionError for an unknown key.
    """
    given = {**config.mode_options(mode), **given}
    extra_keys = extra_options().keys()
    own: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    for key, value in given.items():
        if key in CORE_KEYS:
            own[key] = _coerce(key, value)
        elif key in extra_keys:
            extra[key] = value
        elif config.is_inductor_key(key):
            inductor[key.replace("-", "_")] = value
        elif key != "guard_filter_fn":  # torch.compile takes that one itself
            raise _unknown_option(key)
    return PassOptions(**own, extra=extra), inductor


def _coerce(key: str, value: Any) -> Any:
    if key in ("passes", "disable"):
        if isinstance(value, str):
            value = (value,)
        if value is None and key == "passes":
            return None
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise OptionError(
                f"Option {key!r} is {value!r}.", "It takes a list of pass names.", _names_fix()
            )
        return tuple(value)
    if key == "exact":
        if not isinstance(value, bool):
            raise OptionError(f"Option 'exact' is {value!r}.", "It takes True or False.")
        return value
    if key == "schedule" and isinstance(value, Mapping):
        return ScheduleOptions.of(value)
    if key in ("topology", "report"):
        if value is not None and not isinstance(value, (str, os.PathLike)):
            raise OptionError(f"Option {key!r} is {value!r}.", "It takes a name or a path.")
        return None if value is None else os.fspath(value)
    return value


def _names_fix() -> str:
    return f"Known passes are {', '.join(_known_names())}."


def _one_of(key: str, value: object, known: tuple[object, ...]) -> None:
    if value not in known:
        raise OptionError(
            f"Option {key!r} is {value!r}.", "", f"It takes one of {', '.join(map(repr, known))}."
        )
