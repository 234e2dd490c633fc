"""Dynamo's guards: installed while tracing, and checked on each call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
import torch._dynamo.guards as _guards
import torch._dynamo.source as _sources
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource, is_constant_source
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext
from torch._library.fake_class_registry import FakeScriptObject

from dynamo_dist.torch_compat.dynamo_building import unwrap
from dynamo_dist.torch_compat.patching import Patch, SetItem, Upstream, WrapFunction

Check = Callable[[Any], bool]


def same_or(value: object, check: Check) -> Check:
    """Return a check that an object is ``value``, or equals it, or passes ``check``.

    A Python function would cost a frame for each call of a guard; this compares identities in C.
    """
    # list.__contains__ compares by identity before it asks __eq__, all in C.
    return [value, _Passing(check)].__contains__


class _Passing:
    """Equal to whatever passes a check."""

    def __init__(self, check: Check) -> None:
        self.check = check

    def __eq__(self, now: object) -> bool:
        return self.check(now)

    __hash__ = None  # type: ignore[assignment]


# What guards a DTensor's spec, and an object that Dynamo takes as it is (a mesh, a group).
VALUE_GUARDS = ("DTENSOR_SPEC_MATCH", "OPAQUE_OBJ_GUARD_FN_MATCH")


def wrap_checks(name: str, wrap: Callable[[Any, Check], Check]) -> Patch:
    """``wrap(value, check)`` stands for the check of each guard of this kind, made for
    ``value``.
    """

    def build(upstream: Upstream, self: Any, guard: Any) -> None:
        upstream(_Builder(self, self.get(guard), wrap), guard)

    return WrapFunction(GuardBuilder, name, build)


class _Builder:
    """A GuardBuilder whose managers wrap the checks that they are given."""

    def __init__(self, builder: Any, value: Any, wrap: Callable[..., Any]) -> None:
        self.builder, self.value, self.wrap = builder, value, wrap

    def __getattr__(self, name: str) -> Any:
        return getattr(self.builder, name)

    def get_guard_manager(self, guard: Any) -> Any:
        return _Manager(self.builder.get_guard_manager(guard), self.value, self.wrap)


class _Manager:
    def __init__(self, manager: Any, value: Any, wrap: Callable[..., Any]) -> None:
        self.manager, self.value, self.wrap = manager, value, wrap

    def __getattr__(self, name: str) -> Any:
        return getattr(self.manager, name)

    def add_lambda_guard(self, check: Callable[[Any], bool], *rest: Any) -> Any:
        return self.manager.add_lambda_guard(self.wrap(self.value, check), *rest)


def module_and_member(guard: Any) -> tuple[str, str | None] | None:
    """The module in whose traced code the guarded thing was named, and the global's name in it.

    None for what the compiled frame itself names; the global is None for the module itself.
    """
    member = None
    for source in _chain(guard.originating_source):
        if isinstance(source, _sources.GlobalSource):
            alias = source.global_name
            # A global of the compiled frame's own module, which a program may bind anew.
            if not alias.startswith(_IMPORTED):
                return None
            return alias.removeprefix(_IMPORTED).replace("_dot_", "."), member
        member = getattr(source, "member", None)
    return None


_IMPORTED = "__import_"  # and the module's name, with "_dot_" for each dot


def is_on_code(guard: Any) -> bool:
    """Return whether it guards that a module, a class, a function or an operator is the same."""
    return guard.create_fn_name() in _CODE_MATCHES


_CODE_MATCHES = {
    "MODULE_MATCH",
    "CLASS_MATCH",
    "CLOSURE_MATCH",
    "FUNCTION_MATCH",
    "BUILTIN_MATCH",
    "DUPLICATE_INPUT",
}


def guards() -> Any:
    """The guards collected for the frame being compiled, a set; None outside a compile."""
    context = TracingContext.try_get()
    return None if context is None else context.guards_context.dynamo_guards


def cell_of(guard: Any) -> Any:
    """The outermost source above the guard's that is the content of a closure cell, or None."""
    found = None
    for source in _chain(guard.originating_source):
        if isinstance(source, _sources.CellContentsSource):
            found = source
    return found


def function_of(cell: Any) -> Any:
    """The source of the function in whose closure a cell is; None if it is not read from there."""
    closure = getattr(cell.base, "base", None)
    return closure.base if isinstance(closure, _sources.ClosureSource) else None


def index_of(cell: Any) -> int:
    """Return the index of a cell among the function's cells."""
    index: int = cell.base.index
    return index


def is_code_match(guard: Any) -> bool:
    """Return whether the guard is on a function, that it has the same code."""
    return bool(guard.create_fn_name() == "CLOSURE_MATCH")


def attribute_above(source: object, members: Collection[str]) -> Any:
    """``source`` or the first one above it that is an attribute of such a name; None without
    one.
    """
    for step in _chain(source):
        if isinstance(step, _sources.AttrSource) and step.member in members:
            return step
    return None


def is_on_size_or_type(guard: Any) -> bool:
    """Return whether it guards a dictionary's type, its size, or that a key is not in it."""
    return guard.create_fn_name() in _SIZE_OR_TYPE


_SIZE_OR_TYPE = {
    "TYPE_MATCH",
    "SEQUENCE_LENGTH",
    "EMPTY_NN_MODULE_HOOKS_DICT",
    "DICT_NOT_CONTAINS",
}


def member_names(source: object) -> set[str]:
    """The attributes on the way from the frame's variables to ``source``."""
    return {step.member for step in _chain(source) if isinstance(step, _sources.AttrSource)}


def is_on(guard: Any, member: str) -> bool:
    """Return whether the guard is on an attribute of this name."""
    return getattr(guard.originating_source, "member", None) == member


def owner(guard: Any) -> Any:
    """The source of the object whose attribute the guard is on."""
    return guard.originating_source.base


# A number that a dictionary has until it changes, and that no other ever has; None where this torch
# has none.
dict_version: Any = getattr(torch._C._dynamo.guards, "dict_version", None)


def _chain(source: object) -> Iterator[Any]:
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def value_of_source(source: Any) -> Any:
    """Return the value of ``source`` in the frame being compiled; LookupError if unknown."""
    # Sources are written from the outermost frame on, also those of what an inlined function reads.
    root = InstructionTranslator.current_tx().output.root_tx
    names = {"L": root.f_locals, "G": root.f_globals, "list": list, "dict": dict}
    try:
        # A source's name is Python that Dynamo itself evaluates in its guards.
        return eval(source.name, names)
    except Exception as error:
        raise LookupError(source.name) from error


def replace(guards: Any, dropped: set[int], checks: Mapping[Any, Check]) -> None:
    """Take the guards with these ``id``s away, and guard each source of ``checks`` by its check."""
    kept = type(guards.inner)(guard for guard in guards.inner if id(guard) not in dropped)
    # In place, since the tracing context, checkpoints of it and Dynamo's own code hold this very
    # object.
    vars(guards).update(vars(type(guards)(kept)))
    for source, check in checks.items():
        guards.add(source.make_guard(functools.partial(CHECK_MATCH, check=check)))


def CHECK_MATCH(builder: Any, guard: Any, *, check: Check) -> None:
    """Guard: ``check`` holds for the object."""
    code = _guards.get_verbose_code_parts(f"{guard.name} is what it was", guard)
    builder.get_guard_manager(guard).add_lambda_guard(check, code, guard.user_stack)


def guard(tracker: Any, create: Callable[..., None]) -> None:
    """Guard a tracker's object by ``create``: ``VALUE_MATCH`` or ``IDENTITY_MATCH``, bound once
    by partial.
    """
    guard_source(tracker.source, create)


def guard_source(source: Any, create: Callable[..., None]) -> None:
    """The same for a source; nothing to do for none, and for what cannot change."""
    # Dynamo refuses to guard a constant source, which cannot change.
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
    """Guard that ``read(object)`` keeps its value.

    The guard reads no table of torch, so it outlives disable().

    ``method`` is the name of a method without arguments if ``read`` calls just that, which is then
    called and compared in C. With ``hold`` the object is kept, and known by its identity when it
    comes again.
    """
    value = builder.get(guard)
    # Read once, when the guard is built: torch keeps the guard and not the tracker.
    expected = read(unwrap(value))
    code = _guards.get_verbose_code_parts(f"{what} of {guard.name} == {expected!r}", guard)
    # A stand-in has no such method in C++: under an outer trace its value is read in Python.
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

    # Without ``hold`` the guard must not keep a group or mesh alive that the program has given up.
    passes = same_or(value, check) if hold else check
    builder.get_guard_manager(guard).add_lambda_guard(passes, code, guard.user_stack)


def IDENTITY_MATCH(builder: Any, guard: Any) -> None:
    """Guard: it is this very object; under an outer trace, this object or its stand-in."""
    value = builder.get(guard)
    # Under an outer trace each call may come with another stand-in of the same object.
    if isinstance(value, FakeScriptObject):
        VALUE_MATCH(builder, guard, what="id", read=id)
    else:
        builder.ID_MATCH(guard)


def register_guards() -> list[Patch]:
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
