"""Attribute access by Python's own rules, for objects that upstream opens member by member."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from dynamo_dist.torch_compat import dynamo_building

_ABSENT = object()


def python_attribute(tracker: Any, tx: Any, name: str) -> object:
    """The tracker of ``tracker.real.name``; None for a method written in C.

    A Python method or property is traced with ``tracker`` as self. Plain data is built from its
    source, so it is guarded by value; without a source it is a constant of the object. A missing
    attribute is the program's AttributeError.
    """
    real = tracker.real
    found = inspect.getattr_static(type(real), name, _ABSENT)
    if found is _ABSENT and not hasattr(real, name):
        dynamo_building.missing_attribute(tx, real, name)
    if isinstance(found, (staticmethod, classmethod)):
        return dynamo_building.build(tx, getattr(real, name))
    if isinstance(found, FunctionType):
        return dynamo_building.build_callable(
            lambda *args, **kwargs: dynamo_building.build(tx, found).call_function(
                tx, [tracker, *args], kwargs
            )
        )
    if is_python_property(real, name):
        return dynamo_building.build(tx, found.fget).call_function(tx, [tracker], {})
    if is_data(real, name):
        return dynamo_building.build(
            tx, getattr(real, name), dynamo_building.attribute_source(tracker, name)
        )
    return None


def bound_method(tracker: Any, tx: Any, name: str) -> object:
    """A tracker that answers calls by ``tracker.method(tx, name, args, kwargs)``."""
    return dynamo_building.build_callable(
        lambda *args, **kwargs: tracker.method(tx, name, list(args), kwargs)
    )


def is_python_property(real: object, name: str) -> bool:
    """Return whether reading ``real.name`` runs Python code of its class."""
    found = inspect.getattr_static(type(real), name, None)
    return isinstance(found, property) and isinstance(found.fget, FunctionType)


def is_data(real: object, name: str) -> bool:
    """Return whether ``real.name`` is a value and no method: in its ``__dict__``, or computed by
    its class.
    """
    if name in getattr(real, "__dict__", {}):
        return True
    return inspect.isdatadescriptor(inspect.getattr_static(type(real), name, None))


def has_attribute(real: object, name: str) -> bool | None:
    """``hasattr(real, name)``; None where only running the user's Python code could tell."""
    if hasattr(type(real), "__getattr__"):
        return None
    if is_python_property(real, name) and not type(real).__module__.startswith("torch."):
        return None
    return hasattr(real, name)


def refuse(real: object, name: str) -> Any:
    """Break the graph at a method written in C that we have no rule for."""
    dynamo_building.graph_break(
        "Method of a distributed object that is written in C++",
        f"{type(real).__name__}.{name}",
        f"{name} of {type(real).__name__} is no constant of the object, and no Python to trace.",
        "Call it outside the compiled function.",
    )
