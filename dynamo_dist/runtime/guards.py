"""Guards that cost less on every call and fail when upstream's would: values, module hooks,
closures.

Upstream guards a hook leaf by leaf down to the placements in its closure, for every hook of a
tensor parallel style. Almost none of that can change while the closure's cells hold the same
objects.

Three kinds take most of the time of a DTensor module's guards:

- The spec and mesh of each parameter are compared field by field in Python.
- Each hook of a tensor parallel style is guarded leaf by leaf.
- Functions of ours that are traced in place of torch's are guarded like the program's own.

Upstream walks through three dictionaries of each module that tensor parallel styles have put hooks
on. Those of the module that was traced are what they were until their versions change.
"""

from __future__ import annotations

import functools
import logging
import operator
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import CellType, CodeType, FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from dynamo_dist.torch_compat import dtensor_specs, dynamo_guards
from dynamo_dist.torch_compat.patching import Patch

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from dynamo_dist.torch_compat import Guard

log = logging.getLogger(__name__)

_code = operator.attrgetter("__code__")
_contents = operator.attrgetter("cell_contents")
_CLOSURES_HOOKS = {"_forward_hooks", "_forward_pre_hooks"}


class Closures:
    """The guarded hooks whose closures hold only constants, with one check for each.

    checks: source of a hook -> check that stands for the guards whose ``id``s are ``implied``, as
        long as ``are_as_they_were()``.
    contents: source of a cell -> what it holds.
    """

    def __init__(self, guards: Any) -> None:
        self.checks: dict[object, dynamo_guards.Check] = {}
        self.contents: dict[object, object] = {}
        self.implied: set[int] = set()
        # Without versions of dictionaries each call would have to compare the hooks one by one.
        if dynamo_guards.dict_version is None:
            return
        # What hooks consist of, and what that was when they were traced.
        self._functions: list[FunctionType] = []
        self._codes: list[CodeType] = []
        self._cells: dict[int, CellType] = {}  # by id: the hooks of a module share some
        self._values: dict[int, object] = {}
        self._keywords: list[dict[str, object]] = []
        below: dict[Any, list[Any]] = defaultdict(list)
        for guard in guards.inner:
            cell = dynamo_guards.cell_of(guard)
            # Only hooks of modules: tensor parallel styles make one closure for each module, with
            # mesh and placements in cells.
            if cell is not None and _CLOSURES_HOOKS & dynamo_guards.member_names(cell):
                below[dynamo_guards.function_of(cell)].append(guard)
        for source, under in below.items():
            try:
                self._add(source, under)
            except LookupError as unknown:
                # A source that cannot be read while tracing keeps the guards that Dynamo made for
                # it.
                log.debug("upstream's guards stay on %s", unknown)
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
        # One cell that may change keeps all of upstream's guards on this hook.
        if type(function) is not FunctionType or not all(map(is_immutable, cells.values())):
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
        # A partial's keywords were empty when it was traced; its dictionary is mutable, so it is
        # looked at again.
        if any(self._keywords) or not are(self._codes, map(_code, self._functions)):
            return False
        try:
            now = list(map(_contents, self._cells.values()))
        except ValueError:  # a cell is empty now
            return False
        before = self._values.values()
        return are(before, now) or all(map(is_equal, before, now))


def are(before: Iterable[object], now: Iterable[object]) -> bool:
    """Return whether the objects of two equally long iterables are the same ones; asked in C."""
    return all(map(operator.is_, before, now))


def is_same_hook(code: CodeType, held: Mapping[int, object], hook: Callable[..., object]) -> bool:
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


def is_immutable(value: object) -> bool:
    """Return whether nothing that tracing reads from ``value`` can change while it is the same
    object.

    Numbers and strings count only inside another value: on their own, upstream's guard is one
    comparison.
    """
    if isinstance(value, functools.partial):
        exact = type(value) is functools.partial and not value.keywords
        return exact and all(map(_is_constant, (value.func, *value.args)))
    return isinstance(value, (DeviceMesh, Placement, FunctionType)) and _is_constant(value)


def _is_constant(value: object) -> bool:
    if isinstance(value, FunctionType):
        # A closure's cells can be bound anew, and attributes can be set, without the function
        # becoming another object.
        return value.__closure__ is None and not value.__dict__
    if isinstance(value, tuple):
        return all(map(_is_constant, value))
    return value is None or isinstance(value, (bool, int, float, str, type, Placement, DeviceMesh))


def is_equal(a: Any, b: Any) -> bool:
    """Return whether ``b`` equals ``a``, a value for which ``is_immutable`` holds.

    Functions that the same line has made again are equal.
    """
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


_MODULE_HOOKS_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_DICTS = (*_MODULE_HOOKS_HOOKS, "_forward_hooks_always_called")


class ModuleHooks:
    """Modules for which one check stands for all guards on their hooks.

    ``guards``: those that are left beside ``hooks``: source of a hook -> check that stands for all
        guards on it.
    checks: source of a module -> its check. It replaces the checks of ``hooks`` that are
        ``replaced`` and the guards whose ``id``s are ``implied``.
    """

    def __init__(self, guards: Iterable[Any], hooks: Mapping[object, dynamo_guards.Check]) -> None:
        self.checks: dict[object, dynamo_guards.Check] = {}
        self.replaced: set[object] = set()
        self.implied: set[int] = set()
        below: dict[Any, list[Any]] = defaultdict(list)
        for guard in guards:
            held_by = dynamo_guards.attribute_above(guard.originating_source, _DICTS)
            if held_by is not None:
                below[held_by.base].append(guard)
        sources: dict[Any, list[Any]] = defaultdict(list)
        for source in hooks:
            sources[dynamo_guards.attribute_above(source, _DICTS).base].append(source)
        for owner, those in sources.items():
            # A guard of another kind below the module's hooks says something that our check does
            # not.
            if all(map(_is_on_dictionary, below[owner])):
                self._add(owner, {source: hooks[source] for source in those}, below[owner])

    def _add(
        self, owner: Any, hooks: Mapping[Any, dynamo_guards.Check], under: Sequence[Any]
    ) -> None:
        try:
            module = dynamo_guards.value_of_source(owner)
            checks = {
                id(dynamo_guards.value_of_source(source)): check for source, check in hooks.items()
            }
        except LookupError:
            return
        if isinstance(module, nn.Module) and all(
            id(hook) in checks for hook in chain(*_hooks(module))
        ):
            self.checks[owner] = _Hooks(module, checks).are_same
            self.replaced |= set(hooks)
            self.implied |= set(map(id, under))


def _is_on_dictionary(guard: Guard) -> bool:
    return dynamo_guards.is_on_size_or_type(guard) and any(
        dynamo_guards.is_on(guard, name) for name in _DICTS
    )


def _hooks(module: torch.nn.Module) -> list[list[object]]:
    return [list(getattr(module, name).values()) for name in _MODULE_HOOKS_HOOKS]


def _versions(module: Any) -> tuple[int, int, int]:
    version = dynamo_guards.dict_version
    return (
        version(module._forward_hooks),
        version(module._forward_pre_hooks),
        version(module._forward_hooks_always_called),
    )


class _Hooks:
    """The hooks of ``module`` as it was traced; ``checks``: id of a hook -> whether another is
    the same.
    """

    def __init__(self, module: torch.nn.Module, checks: Mapping[int, dynamo_guards.Check]) -> None:
        self.traced = _hooks(module)
        self.checks = [[checks[id(hook)] for hook in hooks] for hooks in self.traced]
        self.types = [type(getattr(module, name)) for name in _DICTS]
        self.versions = _versions(module)

    def are_same(self, module: torch.nn.Module) -> bool:
        """Return whether another module, or this one later, has hooks that do the same."""
        versions = _versions(module)
        if versions == self.versions:
            return True
        if [type(getattr(module, name)) for name in _DICTS] != self.types:
            return False
        now = _hooks(module)
        if not all(map(_pass, self.checks, now)):
            return False
        # Such a hook also runs where forward raises; the trace has none.
        if module._forward_hooks.keys() & module._forward_hooks_always_called.keys():
            return False
        # Closures of the traced hooks are compared on every call, and those of others here alone.
        if are(chain(*self.traced), chain(*now)):
            # From now on the fast path answers for these dictionaries; a copy of the same hooks in
            # another module does not get it.
            self.versions = versions
        return True


def _pass(checks: Sequence[dynamo_guards.Check], hooks: Sequence[object]) -> bool:
    return len(checks) == len(hooks) and all(
        check(hook) for check, hook in zip(checks, hooks, strict=True)
    )


def patches() -> list[Patch]:
    """List the changes to apply while the plugin is enabled."""
    return [dynamo_guards.wrap_checks(name, identity_first) for name in dynamo_guards.VALUE_GUARDS]


def is_on_own_code(guard: Guard) -> bool:
    """Return whether it guards what stands in our own modules and stays: functions, constants,
    imported modules.

    What is read by way of a module that ours import, such as the default group, is guarded.
    """
    named = dynamo_guards.module_and_member(guard)
    if named is None or named[0].split(".")[0] != __name__.split(".")[0]:
        return False
    module, member = named
    value = None if member is None else vars(sys.modules[module]).get(member)
    return dynamo_guards.is_on_code(guard) or isinstance(value, (str, int, float, tuple, frozenset))


def identity_first(value: object, check: dynamo_guards.Check) -> dynamo_guards.Check:
    """``check``, which ``value`` passes, not asked about ``value`` itself or a spec that equals it.

    ``value`` is held, so that its identity is not given to another. Values that may change while
    they are the same object, which is all but specs and meshes, are checked every time.
    """
    if isinstance(value, dtensor_specs.DTensorSpec):
        return dynamo_guards.same_or(value, check)
    if isinstance(value, DeviceMesh):  # those that count as equal may have other groups
        # A list would compare by ``==``, which holds for meshes of equal ranks whose groups differ.
        return lambda now: now is value or check(now)
    return check


def lighten() -> dict[object, object]:
    """Replace guards of the frame that is being compiled, before they are built.

    Returns what the constant cells of hooks' closures hold, by their sources.
    """
    guards = dynamo_guards.guards()
    if guards is None:
        return {}
    own = {id(guard) for guard in guards.inner if is_on_own_code(guard)}
    closures = Closures(guards)
    # Guards that another check implies must not keep a module's hooks from getting one check.
    left = [guard for guard in guards.inner if id(guard) not in closures.implied | own]
    modules = ModuleHooks(left, closures.checks)
    dropped = _meshes_of_specs(guards) | closures.implied | modules.implied | own
    if dropped:
        log.debug("%d guards are implied by others", len(dropped))
        checks = {
            at: is_same for at, is_same in closures.checks.items() if at not in modules.replaced
        }
        checks |= modules.checks
        if checks:
            # One check for each call looks at the cells of all closures; the others rely on it.
            # It does not matter which one: all guards of a frame are checked on each call.
            last, check = checks.popitem()
            checks[last] = lambda value: closures.are_as_they_were() and check(value)
        dynamo_guards.replace(guards, dropped, checks)
    return closures.contents


def _meshes_of_specs(guards: Any) -> set[int]:
    """Guards on the mesh of a DTensor whose spec is guarded, which compares the mesh."""
    specs = {
        dynamo_guards.owner(each) for each in guards.inner if dynamo_guards.is_on(each, "_spec")
    }
    return {
        id(guard)
        for guard in guards.inner
        if dynamo_guards.is_on(guard, "device_mesh") and dynamo_guards.owner(guard) in specs
    }
