"""Private torch names of guards and of DTensor's wrapping.

Seen in torch 2.11 to 2.15; what a torch lacks leaves stock's way in place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch._dynamo.guards as _guards
import torch._dynamo.source as _sources
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec

from dynamo_dist._torch import Change, SetAttribute, WrapAttribute

Check = Callable[[Any], bool]

_CELL = getattr(_sources, "CellContentsSource", None)


# --- Guards ----------------------------------------------------------------------------------------


# What guards a DTensor's spec, and an object that Dynamo takes as it is (a mesh, a group, from 2.12).
VALUE_GUARDS = tuple(
    name
    for name in ("DTENSOR_SPEC_MATCH", "OPAQUE_OBJ_GUARD_FN_MATCH")
    if hasattr(GuardBuilder, name)
)


def wrap_checks(name: str, wrap: Callable[[Any, Check], Check]) -> Change:
    """``wrap(value, check)`` stands for the check of each guard of this kind, made for ``value``."""
    stock = getattr(GuardBuilder, name)

    @functools.wraps(stock)
    def build(self: Any, guard: Any) -> None:
        stock(_Builder(self, self.get(guard), wrap), guard)

    return SetAttribute(GuardBuilder, name, build)


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


def guards() -> Any:
    """The guards collected for the frame being compiled, a set; None outside a compile."""
    context = TracingContext.try_get()
    return None if context is None else context.guards_context.dynamo_guards


def cell_of(guard: Any) -> Any:
    """The outermost source above the guard's that is the content of a closure cell, or None."""
    found = None
    for source in _chain(guard.originating_source):
        if _CELL is not None and isinstance(source, _CELL):
            found = source
    return found


def member_names(source: Any) -> set[str]:
    """The attributes on the way from the frame's variables to ``source``."""
    return {step.member for step in _chain(source) if isinstance(step, _sources.AttrSource)}


def is_on(guard: Any, member: str) -> bool:
    """Whether the guard is on an attribute of this name."""
    return getattr(guard.originating_source, "member", None) == member


def owner(guard: Any) -> Any:
    """The source of the object whose attribute the guard is on."""
    return guard.originating_source.base


def _chain(source: Any) -> Iterator[Any]:
    while source is not None:
        yield source
        source = getattr(source, "base", None)


def value_of(source: Any) -> Any:
    """What ``source`` is in the frame that is being compiled; LookupError if it cannot be told."""
    root = InstructionTranslator.current_tx().output.root_tx
    name = source.name if isinstance(source.name, str) else source.name()
    try:
        return eval(name, {"L": root.f_locals, "G": root.f_globals, "list": list, "dict": dict})
    except Exception as error:
        raise LookupError(name) from error


def replace(guards: Any, dropped: set[int], checks: Mapping[Any, Check]) -> None:
    """Take the guards with these ``id``s away, and guard each source of ``checks`` by its check."""
    kept = type(guards.inner)(guard for guard in guards.inner if id(guard) not in dropped)
    vars(guards).update(vars(type(guards)(kept)))
    for source, check in checks.items():
        guards.add(source.make_guard(functools.partial(CHECK_MATCH, check=check)))


def CHECK_MATCH(builder: Any, guard: Any, *, check: Check) -> None:
    """Guard: ``check`` holds for the object."""
    code = _guards.get_verbose_code_parts(f"{guard.name} is what it was", guard)
    builder.get_guard_manager(guard).add_lambda_guard(check, code, guard.user_stack)


# --- Wrapping --------------------------------------------------------------------------------------


def wrap_with(unflatten: Callable[..., DTensor]) -> Change:
    """``unflatten`` becomes ``DTensor.__tensor_unflatten__``, and gets the one before as ``stock``."""
    return WrapAttribute(
        DTensor,
        "__tensor_unflatten__",
        lambda stock: staticmethod(functools.partial(unflatten, stock=stock)),
    )


stock_unflatten: Callable[..., DTensor] = DTensor.__tensor_unflatten__
