"""``trace_instead``: what Dynamo traces where a program calls a function that it cannot trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dynamo_dist.errors import ConfigError
from dynamo_dist.torch_compat import dynamo_building, dynamo_compiler, dynamo_trackers, patching
from dynamo_dist.torch_compat.patching import Patch

_Function = TypeVar("_Function", bound=Callable[..., Any])
hooked: dict[int, tuple[Callable[..., object], Callable[..., object]]] = {}


def trace_instead(function: Callable[..., object]) -> Callable[[_Function], _Function]:
    """Have the decorated function traced wherever a compiled program calls ``function``.

    It takes the same arguments, and gives the same values out of operations that a graph can hold:
    functional collectives, a custom operator. Eager code calls ``function`` as before. In force now
    and after each ``enable()``; a second one for ``function`` takes the place of the first. Raises
    ConfigError if either is not callable.
    """

    def register(replacement: _Function) -> _Function:
        for given in (function, replacement):
            if not callable(given):
                raise ConfigError(
                    f"trace_instead got {given!r}, which is no function.",
                    "It replaces the calls of one function by those of another.",
                    "Pass the function that the program calls, and decorate the one to trace.",
                )
        with dynamo_compiler.compile_lock:
            hooked[id(function)] = (function, replacement)
            if patching.is_enabled():
                patching.apply(_change(function, replacement))
        return replacement

    return register


def patches() -> list[Patch]:
    """List the patches that enabling makes for the functions that were registered."""
    return [patch for pair in hooked.values() for patch in _change(*pair)]


def _change(function: Callable[..., object], replacement: Any) -> list[Patch]:
    return dynamo_trackers.on_function(
        function,
        lambda tx, args, kwargs: dynamo_building.call_traced(tx, replacement, args, kwargs),
    )
