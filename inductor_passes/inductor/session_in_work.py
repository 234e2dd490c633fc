"""The session of the compile in work on this thread: torch calls back with no more than a graph,
or a key. Apart from the session, which loads all passes: what asks for it here does not.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inductor_passes.inductor.session import CompileSession

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
