"""``enable(inductor=True)``: programs that cannot name a backend compile as with ``backend="dynamo_dist"``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynamo_dist.torch_compat.patching import Change, Made

_OWNER = "dynamo_dist"
_taken: Mapping[str, Any] | None = None


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options for all compiles by ``backend="inductor"``. Raises OptionError for one that is not ours, TopologyError."""
    if not options:
        return {}
    from dynamo_dist import graph_compile
    from inductor_passes.inductor import installed

    graph_compile.register_switches()
    return installed.checked(options, "enable(inductor=...)")


def taken() -> Mapping[str, Any] | None:
    """Return the options with which compiles by ``backend="inductor"`` are ours; None if they are not."""
    return _taken


def restore(options: Mapping[str, Any] | None) -> None:
    """Let ``backend="inductor"`` be as ``taken()`` said."""
    if options != taken():
        _take(options)


def taking(options: Mapping[str, Any]) -> Change:
    """Compile graphs of ``backend="inductor"`` as by ours, with ``options`` for compiles that are given no other.

    The class and the function behind that name, seen in 2.13 to 2.15, ask us.
    """
    return _Taking(options)


class _Taking(Made):
    def __init__(self, options: Mapping[str, Any]) -> None:
        from inductor_passes.torch_compat.backend import PLACES

        self.options, self.of = options, PLACES

    def apply(self) -> None:
        self.before = taken()
        _take(self.options)

    def undo(self) -> None:
        _take(self.before)


def _take(options: Mapping[str, Any] | None) -> None:
    global _taken  # noqa: PLW0603 - what is taken is one thing of the process
    from dynamo_dist import graph_compile
    from inductor_passes.inductor import installed

    graph_compile.register_switches()
    part = None if options is None else installed.Part(options, graph_compile.compile_frame)
    installed.put(_OWNER, part)
    _taken = options
