"""Process groups while tracing, boxed ones too.

Upstream opens seven members of a group and guards none that is a method: the size of
the first group stays in the graph when another group is passed. Here every value that the program
looks at is guarded, and none that it does not look at.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.torch_compat import c10d, dynamo_building, dynamo_guards, dynamo_trackers
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import attributes
from dynamo_dist.tracing.attributes import is_data, python_attribute

_TYPE = "__torch__.torch.classes.c10d.ProcessGroup"


def boxed(group_name: str) -> Any:
    """In the graph: the box of the group that is registered under this name."""
    return c10d.resolve_process_group(group_name).boxed()


def is_boxed_group(value: object) -> bool:
    """Return whether it is the box of a process group."""
    return isinstance(value, torch.ScriptObject) and value._type().qualified_name() == _TYPE


def unboxed(box: Any) -> dist.ProcessGroup:
    """The group in a box."""
    return dist.ProcessGroup.unbox(box)


def _name(box: Any) -> str | None:
    return unboxed(box).group_name if is_boxed_group(box) else None


class BoxedGroupVariable(dynamo_trackers.ConstantTracker):
    """The box as an argument of an operator: the graph looks the group up by its name."""

    def attribute(self, tx: Any, name: str) -> Any:
        if not hasattr(self.value, name):
            dynamo_building.missing_attribute(tx, self.value, name)
        return dynamo_building.build_callable(
            lambda *args, **kwargs: attributes.refuse(self.value, name)
        )

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        return attributes.refuse(self.value, name)

    def as_proxy(self) -> Any:
        # Torch keeps an operator's fake results by its arguments, and boxes have a hash but no
        # equality.
        dynamo_trackers.keep_no_fake_results()
        return dynamo_trackers.constant_node(boxed, unboxed(self.value).group_name)


_GUARD = functools.partial(dynamo_guards.VALUE_MATCH, what="group", read=_name)


def _boxed_group_from_outside(tx: Any, value: Any, source: Any) -> Any:
    """The tracker of a box that is an argument, an attribute or an item of something."""
    dynamo_guards.guard_source(source, _GUARD)
    return BoxedGroupVariable(value, source=source)


def boxed_group_patches() -> list[Patch]:
    """List the patches that enabling makes for boxes from outside; ``group.boxed()`` is the
    group's own member.
    """
    return dynamo_trackers.on_values(torch.ScriptObject, is_boxed_group, _boxed_group_from_outside)


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


# A group's values never change; one guard each. "id" is the object itself: equality, hash, text.
METHODS = {"size": "size", "rank": "rank", "name": "name", "backend": "_get_backend_name"}
READERS: Mapping[str, Callable[[Any], Any]] = {
    **{what: operator.methodcaller(method) for what, method in METHODS.items()},
    "ranks": _ranks,
    "c10d_backend": dist.get_backend,
}
GUARDS: Mapping[str, Callable[..., None]] = {
    "id": dynamo_guards.IDENTITY_MATCH,
    **{
        what: functools.partial(
            dynamo_guards.VALUE_MATCH, what=what, read=read, method=METHODS.get(what)
        )
        for what, read in READERS.items()
    },
}

# Methods without arguments that are a value of the group -> the guard.
VALUE_METHODS = {
    **{method: what for what, method in METHODS.items()},
    **dict.fromkeys(("_id", "__hash__", "__repr__", "__str__"), "id"),
}

# Methods whose result belongs to the group and lives as long -> how to hold it while tracing.
PART_METHODS = ("_get_backend", "boxed")

# c10d queries of a group, which upstream traces through the tables of c10d -> the value that they
# read.
QUERIES: Mapping[Callable[..., Any], str] = {
    dist.get_rank: "rank",
    dist.get_world_size: "size",
    dist.get_process_group_ranks: "ranks",
    dist.get_global_rank: "ranks",
    dist.get_group_rank: "ranks",
    dist.get_backend: "c10d_backend",
    c10d.group_tag: "id",
}


class ProcessGroupVariable(dynamo_trackers.GroupTracker):
    """A process group. As an argument of a collective it stays what upstream makes of it."""

    def guard_value(self, what: str) -> None:
        """Recompile when ``what`` (a key of ``GUARDS``) of the group changes."""
        if what == "rank":
            dynamo_building.note_rank_dependent()
        dynamo_guards.guard(self, GUARDS[what])

    def guard_identity(self) -> None:
        self.guard_value("id")

    def attribute(self, tx: Any, name: str) -> Any:
        if name in VALUE_METHODS or name in PART_METHODS or name in ("__eq__", "__ne__"):
            return attributes.bound_method(self, tx, name)
        found = python_attribute(self, tx, name)
        if found is None:
            return dynamo_building.build_callable(
                lambda *args, **kwargs: attributes.refuse(self.real, name)
            )
        return found

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name in VALUE_METHODS and not args and not kwargs:
            self.guard_value(VALUE_METHODS[name])
            return dynamo_building.build(tx, getattr(self.real, name)())
        if name in ("__eq__", "__ne__") and len(args) == 1:
            self.guard_identity()
            return dynamo_building.build(tx, getattr(self.real, name)(args[0].as_python_constant()))
        if name in PART_METHODS and (values := dynamo_building.constants(args, kwargs)) is not None:
            return self._part(tx, name, values)
        return self.attribute(tx, name).call_function(tx, args, kwargs)

    def has_attribute(self, tx: Any, name: str) -> bool | None:
        return attributes.has_attribute(self.real, name)

    def text(self, tx: Any, name: str) -> Any:
        return self.method(tx, name, [], {})

    def _part(self, tx: Any, name: str, values: tuple[list[Any], dict[str, Any]]) -> Any:
        self.guard_identity()
        args, kwargs = values
        part = getattr(self.real, name)(*args, **kwargs)
        return BoxedGroupVariable(part) if name == "boxed" else GroupPartVariable(part)


class GroupPartVariable(dynamo_trackers.ConstantTracker):
    """An object that belongs to a group, such as its backend; guarded through the group."""

    def attribute(self, tx: Any, name: str) -> Any:
        if not hasattr(self.value, name):
            dynamo_building.missing_attribute(tx, self.value, name)
        if is_data(self.value, name):
            return self._constant(tx, getattr(self.value, name))
        return attributes.bound_method(self, tx, name)

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if name in METHODS.values() and not args and not kwargs:
            if name == "rank":
                dynamo_building.note_rank_dependent()
            return self._constant(tx, getattr(self.value, name)())
        return attributes.refuse(self.value, name)

    def _constant(self, tx: Any, value: object) -> Any:
        return (
            dynamo_building.build(tx, value)
            if dynamo_building.is_literal(value)
            else GroupPartVariable(value)
        )


def answer_query(
    function: Callable[..., Any], tx: Any, args: list[Any], kwargs: dict[str, Any]
) -> Any:
    """A c10d query while tracing: its answer, with what it read of the group guarded.

    The group is the one it is given, or the default group. None leaves the query to upstream: for
    arguments that are not constants, and for a query that fails.
    """
    args, kwargs = [a.realize() for a in args], {name: a.realize() for name, a in kwargs.items()}
    given = [*args, *kwargs.values()]
    groups = [value for value in given if isinstance(value, ProcessGroupVariable)]
    if not groups and any(not value.is_constant_none() for value in given):
        return None
    try:
        answer = function(
            *map(_value, args), **{name: _value(value) for name, value in kwargs.items()}
        )
    except Exception:
        return None
    what = QUERIES[function]
    if groups:
        groups[0].guard_value(what)
    else:
        dynamo_guards.guard_source(dynamo_building.default_group_source(tx), GUARDS[what])
        if what == "rank":
            dynamo_building.note_rank_dependent()
    return dynamo_building.build(tx, answer)


def _value(tracker: Any) -> Any:
    is_group = isinstance(tracker, ProcessGroupVariable)
    return tracker.real if is_group else tracker.as_python_constant()


def resolve_group(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``_resolve_process_group(name)``: the registered group, guarded to be the one of that
    name.
    """
    if (values := dynamo_building.constants(args, kwargs)) is None:
        return None
    group = c10d.resolve_process_group(*values[0], **values[1])
    tracker = dynamo_building.build_by_weakref(tx, group)
    dynamo_guards.guard(tracker, _REGISTERED)
    return tracker


def _is_registered(group: dist.ProcessGroup) -> bool:
    return c10d.resolve_process_group(group.group_name) is group


_REGISTERED = functools.partial(dynamo_guards.VALUE_MATCH, what="registration", read=_is_registered)


def patches() -> list[Patch]:
    """List the changes that enabling this tracker makes, besides tracking the type."""
    return [
        *boxed_group_patches(),
        *(
            patch
            for query in QUERIES
            for patch in dynamo_trackers.on_function(query, functools.partial(answer_query, query))
        ),
        *dynamo_trackers.on_function(c10d.resolve_process_group, resolve_group),
    ]
