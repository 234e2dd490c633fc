"""Placements: values that compare by ``==``, so the object itself may stand in the graph's code."""

from __future__ import annotations

import copy
from typing import Any

from torch.distributed.tensor import Placement

from dynamo_dist import _torch


class PlacementVariable(_torch.PlacementTracker):
    """A placement, torch's own or a subclass of the user's."""

    def has_attribute(self, tx: Any, name: str) -> bool | None:
        # A Python ``__getattr__`` is the user's code: stock traces it.
        if hasattr(type(self.real), "__getattr__"):
            return None
        return hasattr(self.real, name)


def copied(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``copy.copy`` and ``copy.deepcopy`` of a placement: an equal placement; None for other things."""
    if len(args) == 1 and isinstance(args[0], PlacementVariable):
        return _torch.build(tx, copy.copy(args[0].as_python_constant()))
    return None


def class_has_attribute(cls: Any, name: str) -> bool | None:
    """``hasattr(Shard, name)``; None for a class that is no placement."""
    if isinstance(cls, type) and issubclass(cls, Placement):
        return hasattr(cls, name)
    return None


def load(tracker: Any) -> tuple[Any, bool]:
    """How the compiled function gets a placement that was made while tracing: itself, or how to make it.

    Torch's own cannot change and are shared; a subclass may hold state, so each call makes a new one.
    """
    value: Any = tracker.real
    made_by: Any = getattr(tracker, "ctor_args_kwargs", None)
    if made_by is None or type(value).__module__.startswith("torch.distributed.tensor"):
        return value, False
    args, kwargs = made_by
    return (lambda: type(value)(*args, **kwargs)), True


def changes() -> list[_torch.Change]:
    """What enabling this tracker does, besides ``registry.retracked``."""
    return [
        *_torch.on_codegen(PlacementVariable, load),
        *_torch.extend_class_tracker(class_has_attribute),
        *_torch.on_function(copy.copy, copied),
        *_torch.on_function(copy.deepcopy, copied),
    ]
