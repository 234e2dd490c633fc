"""Check the options that users give, and split them from Inductor's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from inductor_passes import order_pinning, registry
from inductor_passes.cost import load_topology
from inductor_passes.errors import OptionError
from inductor_passes.graph_pass import ScheduleOptions
from inductor_passes.torch_compat import inductor as config

PLANS = ("off", "repair")
COMPILES = ("each", "shared")
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
    disable: names of passes to leave out; ``pin_order``; and with ``backend="dynamo_dist"``,
        ``direct_gradients`` to leave gradients of DTensor parameters to autograd,
        ``below_autograd`` to call operators with autograd's kernels.
    topology: a shipped name or a path to JSON; None chooses by the device of the tensors.
    report: a folder for report.html, report.json and trace.json; None writes none.
    schedule: options of the scheduler (``ScheduleOptions``); or ``off`` to leave order to Inductor.
    split: ``off``; a number of parts, 2 or more, that regions of a graph are cut into, so that one
        part computes while another's collective is on its way; or ``auto``, as many as are
        predicted to pay, if any.
    plan: ``off``; ``repair`` re-solves placements that the user has not set (DTensor programs, with
        ``backend="dynamo_dist"``); or a path ending in .json, a plan to follow, written if missing.
    compile: ``each`` rank compiles for itself; or ``shared``: of ranks whose graphs are the same
        one compiles, and the others load what it made, from their common cache folder or through
        the job's store.
    exact: only passes that keep every bit.
    """

    passes: tuple[str, ...] | None = None
    disable: tuple[str, ...] = ()
    topology: str | None = None
    report: str | None = None
    schedule: ScheduleOptions | str = field(default_factory=ScheduleOptions)
    split: int | str = "off"
    plan: str = "off"
    compile: str = "each"
    exact: bool = False

    def __post_init__(self) -> None:
        known = _known_names()
        for name in (*(self.passes or ()), *self.disable):
            if name not in known:
                raise registry.unknown_pass(name, known)
        if not isinstance(self.schedule, ScheduleOptions):
            _one_of("schedule", self.schedule, ("off", {"bucket": True}))
        _check_split(self.split, self.schedule)
        if not self.plan.endswith(".json"):
            _one_of("plan", self.plan, PLANS)
        _one_of("compile", self.compile, COMPILES)
        if self.topology is not None:
            load_topology(self.topology)

    def parts(self) -> dict[str, str]:
        """Return these options by name, as far as they change a compiled graph. ``report`` and
        ``compile`` do not.
        """
        names = (f.name for f in fields(self) if f.name not in ("report", "compile"))
        return {name: repr(getattr(self, name)) for name in names}

    def digest(self) -> str:
        """Return the same as one text."""
        return repr(self.parts())


OWN_KEYS = tuple(field.name for field in fields(PassOptions))


def split(given: Mapping[str, Any], mode: str | None = None) -> tuple[PassOptions, dict[str, Any]]:
    """Our options and Inductor's, from one mapping, on top of those of ``mode``. Raises
    OptionError for an unknown key.
    """
    given = {**config.mode_options(mode), **given}
    own: dict[str, Any] = {}
    inductor: dict[str, Any] = {}
    for key, value in given.items():
        if key in OWN_KEYS:
            own[key] = _coerce(key, value)
        elif config.is_inductor_key(key):
            inductor[key.replace("-", "_")] = value
        elif key != "guard_filter_fn":  # torch.compile takes that one itself
            raise OptionError(
                f"Unknown option {key!r}.",
                f"Ours are {', '.join(OWN_KEYS)}; every key of Inductor's configuration works too.",
                "See torch._inductor.list_options() for those.",
            )
    return PassOptions(**own), inductor


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
    if key == "plan":
        return os.fspath(value) if isinstance(value, (str, os.PathLike)) else str(value)
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


def _check_split(split: int | str, schedule: ScheduleOptions | str) -> None:
    number = isinstance(split, int) and not isinstance(split, bool)
    if not (split >= 2 if number else split in ("off", "auto")):  # type: ignore[operator]
        raise OptionError(
            f"Option 'split' is {split!r}.",
            "A graph is cut into 2 parts or more; fewer leave it whole.",
            "It takes 'off', 'auto' or a whole number from 2 on.",
        )
    if split != "off" and not isinstance(schedule, ScheduleOptions):
        raise OptionError(
            f"Option 'split' is {split!r}, and 'schedule' is {schedule!r}.",
            "Parts gain by the order that the scheduler gives them, and by nothing else.",
            "Leave 'schedule' out, or set 'split' to 'off'.",
        )
