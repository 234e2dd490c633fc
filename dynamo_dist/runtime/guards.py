"""Guards that cost less on every call and fail when stock's would.

Two kinds take most of the time of a DTensor module's guards: each parameter's spec and mesh is compared
field by field in Python, and each hook of a tensor parallel style is guarded leaf by leaf down to the
placements in its closure.
"""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from types import FunctionType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from dynamo_dist._torch import Change
from dynamo_dist.runtime import _torch

log = logging.getLogger(__name__)

_HOOKS = {"_forward_hooks", "_forward_pre_hooks"}


def changes() -> list[Change]:
    """What to apply while the plugin is enabled."""
    return [_torch.wrap_checks(name, identity_first) for name in _torch.VALUE_GUARDS]


def identity_first(value: object, check: _torch.Check) -> _torch.Check:
    """``check``, which ``value`` passes, asked only about an object other than the last that passed.

    That one is held, so that its identity is not given to another. Values that may change while they
    are the same object, which is all but specs and meshes, are checked every time.
    """
    if not isinstance(value, (_torch.DTensorSpec, DeviceMesh)):
        return check
    return _once_per_object(value, check)


def _once_per_object(value: object, check: _torch.Check) -> _torch.Check:
    passed = value

    def match(now: Any) -> bool:
        nonlocal passed
        if now is passed:
            return True
        if check(now):
            passed = now
            return True
        return False

    return match


def lighten() -> None:
    """Replace guards of the frame that is being compiled, before they are built."""
    guards = _torch.guards()
    if guards is None:
        return
    checks, below = _settled_cells(guards)
    dropped = _meshes_of_specs(guards) | below
    if dropped:
        log.debug("%d guards are implied or become %d by value", len(dropped), len(checks))
        _torch.replace(guards, dropped, checks)


def _meshes_of_specs(guards: Any) -> set[int]:
    """Guards on the mesh of a DTensor whose spec is guarded, which compares the mesh."""
    specs = {_torch.owner(each) for each in guards.inner if _torch.is_on(each, "_spec")}
    return {
        id(guard)
        for guard in guards.inner
        if _torch.is_on(guard, "device_mesh") and _torch.owner(guard) in specs
    }


def _settled_cells(guards: Any) -> tuple[dict[Any, _torch.Check], set[int]]:
    """Checks of what module hooks hold in closure cells and cannot change inside, and the guards below."""
    below: dict[Any, list[Any]] = defaultdict(list)
    for guard in guards.inner:
        cell = _torch.cell_of(guard)
        if cell is not None and _HOOKS & _torch.member_names(cell):
            below[cell].append(guard)
    checks, dropped = dict[Any, _torch.Check](), set[int]()
    for cell, under in below.items():
        try:
            value = _torch.value_of(cell)
        except LookupError as unknown:
            log.debug("stock's guards stay on %s", unknown)
            continue
        if is_settled(value):
            checks[cell] = _once_per_object(value, functools.partial(is_equal, value))
            # A partial's keywords can change in place.
            dropped.update(id(guard) for guard in under if not _torch.is_on(guard, "keywords"))
    return checks, dropped


def is_settled(value: object) -> bool:
    """Whether nothing that tracing reads from ``value`` can change while it is the same object.

    Numbers and strings count only inside another value: on their own, stock's guard is one comparison.
    """
    if isinstance(value, functools.partial):
        exact = type(value) is functools.partial and not value.keywords
        return exact and all(map(_is_constant, (value.func, *value.args)))
    return isinstance(value, (DeviceMesh, Placement, FunctionType)) and _is_constant(value)


def _is_constant(value: object) -> bool:
    if isinstance(value, FunctionType):
        return value.__closure__ is None and not value.__dict__
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (bool, int, float, str, type, Placement, DeviceMesh))


def is_equal(a: Any, b: Any) -> bool:
    """Whether ``b`` is what the settled ``a`` is; functions made anew by the same line are equal."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, functools.partial):
        return is_equal(a.func, b.func) and is_equal(a.args, b.args) and not b.keywords
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(is_equal, a, b))
    if isinstance(a, FunctionType):
        return a.__code__ is b.__code__ and a.__globals__ is b.__globals__ and _is_bare(a, b)
    return bool(a == b)


def _is_bare(*functions: FunctionType) -> bool:
    """Whether their code and globals alone say what they do."""
    return not any(
        function.__closure__
        or function.__dict__
        or function.__defaults__
        or function.__kwdefaults__
        for function in functions
    )
