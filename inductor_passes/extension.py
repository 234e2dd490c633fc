"""What a package adds to compiles beside passes: options, a command, log lines, cache keys, checks.

A feature of this package and a package of somebody else register the same way, so that the core
knows neither by name. An extension also asks here what the compile in work wants.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from torch import fx

    from inductor_passes.inductor.session import CompileSession
    from inductor_passes.pass_options import PassOptions
    from inductor_passes.ranks.carried import SharedChoice
    from inductor_passes.records import GraphRecord


@dataclass(frozen=True, slots=True)
class Option:
    """A key of ``options={...}`` that an extension adds; ``PassOptions.extra`` holds its value.

    ``meaning``: for the reference page. ``default``: the value of compiles that do not give it.
    ``check``: gets a value and the other options, and returns the value to keep, whose ``repr`` is
        the same in every process. It raises OptionError.
    """

    meaning: str
    default: Any
    check: Callable[[Any, PassOptions], Any]


@dataclass(frozen=True, slots=True)
class Degraded:
    """Something that is off or less than it could be, for ``doctor``."""

    what: str
    why: str
    fix: str


class Extension:
    """Additions of one package to every compile. A method that is not overridden adds nothing.

    ``options``: by name. ``commands``: of ``python -m inductor_passes``, by name; each has its
    module and its help. ``log_artifact``: what ``TORCH_LOGS`` calls ``log_lines``.
    """

    name: ClassVar[str]
    options: ClassVar[Mapping[str, Option]] = {}
    commands: ClassVar[Mapping[str, tuple[str, str]]] = {}
    log_artifact: ClassVar[str] = ""

    def cache_key(self) -> str:
        """Return what graphs compile by in this process, beside options and passes.

        It is the same on all ranks that may share code.
        """
        return ""

    def binds_groups(self) -> bool:
        """Return whether code made here may hold its own process groups, with memory set up for
        them. Such code keeps their names, and no other rank loads it.
        """
        return False

    def resolved(self, options: PassOptions, gm: fx.GraphModule) -> PassOptions:
        """Return the options of one compile with values that all ranks of the job have, where this
        rank's own would make it another program. ``gm``: the graph of the frame.
        """
        return options

    def before_compile(self) -> None:
        """Prepare what compiled code needs, also code from a cache, for which no pass runs."""

    def before_call(self) -> Callable[[], object] | None:
        """Return what to call before each call of compiled code, or None. What it raises ends the
        call.
        """
        return None

    def log_lines(self, record: GraphRecord) -> Sequence[str]:
        """Return lines about a graph for ``log_artifact``."""
        return ()

    def degraded(self) -> Sequence[Degraded]:
        """Return what this installation lacks."""
        return ()


# Torch calls back with no more than a graph, or a key.
_current: contextvars.ContextVar[CompileSession | None] = contextvars.ContextVar(
    "session", default=None
)


@contextlib.contextmanager
def in_work(session: CompileSession) -> Iterator[None]:
    """What this thread compiles, or loads from a cache, in the block is of this session."""
    token = _current.set(session)
    try:
        yield
    finally:
        _current.reset(token)


def has_trait(trait: str) -> bool:
    """Return whether the compile in work has a trait."""
    session = _current.get()
    return session is not None and trait in session.traits


def carry(choice: SharedChoice) -> None:
    """Let code of the compile in work carry a choice of its ranks."""
    session = _current.get()
    if session is not None:
        session.choices[choice.about] = choice
