"""Process groups: their values become constants, each under a guard of its own.

Stock opens seven members of a group from torch 2.12 on and guards none that is a method: the size of
the first group stays in the graph when another group is passed. Here every value that the program
looks at is guarded, and none that it does not look at.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from dynamo_dist import _torch
from dynamo_dist.trackers.attributes import is_data, python_attribute

_C10D = "torch.distributed.distributed_c10d"


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


# A group's values never change; one guard each. "id" is the object itself: equality, hash, text.
READERS: Mapping[str, Callable[[Any], Any]] = {
    "size": operator.methodcaller("size"),
    "rank": operator.methodcaller("rank"),
    "ranks": _ranks,
    "name": operator.methodcaller("name"),
    "backend": operator.methodcaller("_get_backend_name"),
}
GUARDS: Mapping[str, Callable[..., None]] = {
    "id": _torch.IDENTITY_MATCH,
    **{
        what: functools.partial(_torch.VALUE_MATCH, what=what, read=read)
        for what, read in READERS.items()
    },
}

# Methods without arguments that are a value of the group -> the guard.
VALUE_METHODS = {
    "size": "size",
    "rank": "rank",
    "name": "name",
    "_get_backend_name": "backend",
    "_id": "id",
    "__hash__": "id",
    "__repr__": "id",
    "__str__": "id",
}

# Methods whose result belongs to the group and lives as long -> how to hold it while tracing.
PART_METHODS = ("_get_backend", "boxed")

# c10d queries that stock evaluates while tracing -> the value that they read.
QUERIES = {
    "get_rank": "rank",
    "get_world_size": "size",
    "get_process_group_ranks": "ranks",
    "_get_group_tag": "id",
}


class ProcessGroupVariable(_torch.GroupTracker):
    """A process group. As an argument of a collective it stays what stock makes of it."""

    def guard_value(self, what: str) -> None:
        """Recompile when ``what`` (a key of ``GUARDS``) of the group changes."""
        _torch.guard(self, GUARDS[what])

    def guard_identity(self) -> None:
        self.guard_value("id")

    def attribute(self, tx: Any, name: str) -> Any:
        if name in VALUE_METHODS or name in PART_METHODS or name in ("__eq__", "__ne__"):
            return _torch.build_callable(
                lambda *args, **kwargs: self.method(tx, name, list(args), kwargs)
            )
        found = python_attribute(self, tx, name)
        if found is None:
            return _torch.build_callable(lambda *args, **kwargs: self._refuse(name))
        return found

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name in VALUE_METHODS and not args and not kwargs:
            self.guard_value(VALUE_METHODS[name])
            return _torch.build(tx, getattr(self.real, name)())
        if name in ("__eq__", "__ne__") and len(args) == 1:
            self.guard_identity()
            same = self.real == args[0].as_python_constant()
            return _torch.build(tx, same if name == "__eq__" else not same)
        if name in PART_METHODS and (values := _torch.constants(args, kwargs)) is not None:
            return self._part(tx, name, values)
        return self.attribute(tx, name).call_function(tx, args, kwargs)

    def has_attribute(self, tx: Any, name: str) -> bool:
        return hasattr(self.real, name)

    def text(self, tx: Any, name: str) -> Any:
        return self.method(tx, name, [], {})

    def _part(self, tx: Any, name: str, values: tuple[list[Any], dict[str, Any]]) -> Any:
        self.guard_identity()
        args, kwargs = values
        return GroupPartVariable(getattr(self.real, name)(*args, **kwargs))

    def _refuse(self, name: str) -> Any:
        _torch.graph_break(
            "Method of a process group that acts on other ranks or changes",
            f"ProcessGroup.{name}",
            f"ProcessGroup.{name} is written in C++ and is no constant of the group.",
            f"Call it outside the compiled function, or use torch.distributed in place of group.{name}.",
        )


class GroupPartVariable(_torch.ConstantTracker):
    """An object that belongs to a group, such as its backend; guarded through the group."""

    VALUE_METHODS = frozenset({"name", "size", "rank", "_get_backend_name"})

    def attribute(self, tx: Any, name: str) -> Any:
        if not hasattr(self.value, name):
            _torch.missing_attribute(tx, self.value, name)
        if is_data(self.value, name):
            return self._constant(tx, getattr(self.value, name))
        return _torch.build_callable(
            lambda *args, **kwargs: self.method(tx, name, list(args), kwargs)
        )

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name in self.VALUE_METHODS and not args and not kwargs:
            return self._constant(tx, getattr(self.value, name)())
        _torch.graph_break(
            "Method of a process group's backend that acts on other ranks or changes",
            f"{type(self.value).__name__}.{name}",
            f"{name} is written in C++ and is no constant of the backend.",
            "Call it outside the compiled function.",
        )

    def _constant(self, tx: Any, value: object) -> Any:
        return _torch.build(tx, value) if _torch.is_literal(value) else GroupPartVariable(value)


def guard_query(
    tx: Any, function: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
) -> None:
    """Guard what a c10d query reads: of the group it is given, or of the default group."""
    create = GUARDS[QUERIES[function.__name__]]
    values = [*args, *kwargs.values()]
    groups = [value for value in values if isinstance(value, ProcessGroupVariable)]
    for group in groups:
        _torch.guard(group, create)
    if not groups and all(value.is_python_constant() for value in values):
        _torch.guard_source(_torch.imported_source(tx, _C10D, "GroupMember", "WORLD"), create)


def resolve_group(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``_resolve_process_group(name)``: the registered group, guarded to be the one of that name."""
    if (values := _torch.constants(args, kwargs)) is None:
        return None
    group = _torch.resolve_process_group(*values[0], **values[1])
    tracker = _torch.build_by_weakref(tx, group)
    _torch.guard(tracker, _REGISTERED)
    return tracker


def _is_registered(group: dist.ProcessGroup) -> bool:
    return _torch.resolve_process_group(group.group_name) is group


_REGISTERED = functools.partial(_torch.VALUE_MATCH, what="registration", read=_is_registered)


def changes() -> list[_torch.Change]:
    """What enabling this tracker does, besides ``registry.retracked``."""
    return [
        *_torch.on_group_functions(tuple(QUERIES), guard_query),
        *_torch.on_function(_torch.resolve_process_group, resolve_group),
    ]
