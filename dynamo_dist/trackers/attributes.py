"""Attribute access by Python's own rules, for objects that stock opens member by member."""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import Any

from dynamo_dist import _torch


def python_attribute(tracker: Any, tx: Any, name: str) -> Any:
    """The tracker of ``tracker.real.name``; None for a method or property written in C.

    A Python method or property is traced with ``tracker`` as self. Plain data is built from its source,
    so it is guarded by value; without a source it is a constant of the object. A missing attribute is
    the program's AttributeError.
    """
    real = tracker.real
    if not hasattr(real, name):
        _torch.missing_attribute(tx, real, name)
    found = inspect.getattr_static(type(real), name, None)
    if isinstance(found, (staticmethod, classmethod)):
        return _torch.build(tx, getattr(real, name))
    if isinstance(found, FunctionType):
        return _torch.build_callable(
            lambda *args, **kwargs: _torch.build(tx, found).call_function(
                tx, [tracker, *args], kwargs
            )
        )
    if isinstance(found, property) and isinstance(found.fget, FunctionType):
        return _torch.build(tx, found.fget).call_function(tx, [tracker], {})
    if is_data(real, name):
        return _torch.build(tx, getattr(real, name), _torch.attribute_source(tracker, name))
    return None


def is_data(real: object, name: str) -> bool:
    """Whether ``real.name`` is a value and no method: in its ``__dict__``, or a property written in C."""
    if name in getattr(real, "__dict__", {}):
        return True
    found = inspect.getattr_static(type(real), name, None)
    return isinstance(found, property) or inspect.isdatadescriptor(found)
