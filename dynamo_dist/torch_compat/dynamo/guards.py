"""Guards on values and on identity, installed while tracing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch._dynamo.guards as _guards
from torch._dynamo.guards import install_guard
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource, is_constant_source
from torch._library.fake_class_registry import FakeScriptObject

from dynamo_dist.torch_compat.changes import Change, SetItem
from dynamo_dist.torch_compat.dynamo.checks import same_or
from dynamo_dist.torch_compat.dynamo.opaque import unwrap


def guard(tracker: Any, create: Callable[..., None]) -> None:
    """Guard a tracker's object by ``create``: ``VALUE_MATCH`` or ``IDENTITY_MATCH``, bound once by partial."""
    guard_source(tracker.source, create)


def guard_source(source: Any, create: Callable[..., None]) -> None:
    """The same for a source; nothing to do for none, and for what cannot change."""
    if source is not None and not is_constant_source(source):
        install_guard(source.make_guard(create))


def VALUE_MATCH(
    builder: Any,
    guard: Any,
    *,
    what: str,
    read: Callable[[Any], Any],
    method: str | None = None,
    hold: bool = False,
) -> None:
    """Guard: ``read(object)`` is what it was. Reads nothing of torch's tables, so it outlives disable().

    ``method`` is the name of a method without arguments if ``read`` calls just that, which is then
    called and compared in C. With ``hold`` the object is kept, and known by its identity when it comes
    again.
    """
    value = builder.get(guard)
    expected = read(unwrap(value))
    code = _guards.get_verbose_code_parts(f"{what} of {guard.name} == {expected!r}", guard)
    if method is not None and not isinstance(value, FakeScriptObject):
        source = CallFunctionNoArgsSource(AttrSource(guard.originating_source, method))
        manager = builder.get_guard_manager_from_source(source)
        manager.add_equals_match_guard(expected, code, guard.user_stack)
        return

    def check(value: Any) -> bool:
        try:
            return bool(read(unwrap(value)) == expected)
        except Exception:  # e.g. a group that has been destroyed
            return False

    passes = same_or(value, check) if hold else check
    builder.get_guard_manager(guard).add_lambda_guard(passes, code, guard.user_stack)


def IDENTITY_MATCH(builder: Any, guard: Any) -> None:
    """Guard: it is this very object; under an outer trace, this object or its stand-in."""
    value = builder.get(guard)
    if isinstance(value, FakeScriptObject):
        VALUE_MATCH(builder, guard, what="id", read=id)
    else:
        builder.ID_MATCH(guard)


def register_guards() -> list[Change]:
    """Tell Dynamo's subgraph reuse how to evaluate our guards while tracing."""
    table, spec = _guards.GUARD_VALUE_DISPATCH, _guards.GuardCheckSpec

    def read_value(guard: Any, value: Any) -> tuple[Callable[[Any], Any], Any]:
        read = guard.create_fn.keywords["read"]
        return read, read(unwrap(value))

    return [
        SetItem(
            table,
            "VALUE_MATCH",
            spec(read_value, lambda value, seen: seen[0](unwrap(value)) == seen[1]),
        ),
        SetItem(
            table,
            "IDENTITY_MATCH",
            spec(
                lambda guard, value: id(unwrap(value)),
                lambda value, seen: id(unwrap(value)) == seen,
            ),
        ),
    ]


def value_guard(what: str, read: Callable[[Any], Any], hold: bool = False) -> Callable[..., None]:
    """``VALUE_MATCH`` of ``read(object)``, for ``guard`` and ``guard_source``."""
    return functools.partial(VALUE_MATCH, what=what, read=read, hold=hold)
