"""The objects that module hooks close over, compared in one go.

Stock guards a hook leaf by leaf down to the placements in its closure, for every hook of a tensor
parallel style. Next to nothing of it can change while the closure's cells hold the same objects.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from dynamo_dist.torch_compat import dynamo_guards

log = logging.getLogger(__name__)

_code = operator.attrgetter("__code__")
_contents = operator.attrgetter("cell_contents")
_CLOSURES_HOOKS = {"_forward_hooks", "_forward_pre_hooks"}


class Closures:
    """The hooks, among what guards are on, whose closures are settled.

    checks: source of a hook -> check that stands for the guards whose ``id``s are ``implied``, as long as
        ``are_as_they_were()``.
    contents: source of a cell -> what it holds.
    """

    def __init__(self, guards: Any) -> None:
        self.checks: dict[Any, dynamo_guards.Check] = {}
        self.contents: dict[Any, object] = {}
        self.implied: set[int] = set()
        # What hooks consist of, and what that was when they were traced.
        self._functions: list[FunctionType] = []
        self._codes: list[CodeType] = []
        self._cells: dict[int, CellType] = {}  # by id: the hooks of a module share some
        self._values: dict[int, object] = {}
        self._keywords: list[dict[str, Any]] = []
        below: dict[Any, list[Any]] = defaultdict(list)
        for guard in guards.inner:
            cell = dynamo_guards.cell_of(guard)
            if cell is not None and _CLOSURES_HOOKS & dynamo_guards.member_names(cell):
                below[dynamo_guards.function_of(cell)].append(guard)
        for source, under in below.items():
            try:
                self._add(source, under)
            except LookupError as unknown:
                log.debug("stock's guards stay on %s", unknown)
        self.implied |= {
            id(guard)
            for guard in guards.inner
            if dynamo_guards.is_code_match(guard) and guard.originating_source in self.checks
        }

    def _add(self, source: Any, under: list[Any]) -> None:
        function = None if source is None else dynamo_guards.value_of_source(source)
        cells = {
            cell: dynamo_guards.value_of_source(cell) for cell in map(dynamo_guards.cell_of, under)
        }
        if type(function) is not FunctionType or not all(map(is_settled, cells.values())):
            return
        held = {dynamo_guards.index_of(cell): value for cell, value in cells.items()}
        for index, value in held.items():
            cell = _cells(function)[index]
            self._cells[id(cell)], self._values[id(cell)] = cell, value
            if isinstance(value, functools.partial):
                self._keywords.append(value.keywords)
        self._functions.append(function)
        self._codes.append(function.__code__)
        self.checks[source] = dynamo_guards.same_or(
            function, functools.partial(is_same_hook, function.__code__, held)
        )
        self.contents |= cells
        self.implied |= set(map(id, under))

    def are_as_they_were(self) -> bool:
        """Return whether nothing was bound anew or changed in place in the hooks that were traced.

        Asked before every call, about all of them: by identity first, which costs no Python frame.
        """
        if any(self._keywords) or not are(self._codes, map(_code, self._functions)):
            return False
        try:
            now = list(map(_contents, self._cells.values()))
        except ValueError:  # a cell is empty now
            return False
        before = self._values.values()
        return are(before, now) or all(map(is_equal, before, now))


def are(before: Iterable[Any], now: Iterable[object]) -> bool:
    """Return whether the objects of two equally long iterables are the same ones; asked in C."""
    return all(map(operator.is_, before, now))


def is_same_hook(code: CodeType, held: Mapping[int, object], hook: Any) -> bool:
    """Return whether a function has this code and its cells, by index, hold what these are."""
    if type(hook) is not FunctionType or hook.__code__ is not code:
        return False
    cells = _cells(hook)
    try:
        return all(is_equal(value, cells[index].cell_contents) for index, value in held.items())
    except ValueError:  # a cell is empty
        return False


def _cells(function: FunctionType) -> tuple[CellType, ...]:
    return function.__closure__ or ()


def is_settled(value: object) -> bool:
    """Return whether nothing that tracing reads from ``value`` can change while it is the same object.

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
    """Return whether ``b`` is what the settled ``a`` is; functions made anew by the same line are equal."""
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
    """Return whether their code and globals alone say what they do."""
    return not any(
        function.__closure__
        or function.__dict__
        or function.__defaults__
        or function.__kwdefaults__
        for function in functions
    )
