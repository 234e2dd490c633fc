"""Placements and reduce operations while tracing."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.tensor import Placement

from dynamo_dist.torch_compat import dynamo_building, dynamo_trackers
from dynamo_dist.torch_compat.patching import Patch
from dynamo_dist.tracing import attributes
from dynamo_dist.tracing.device_mesh import DeviceMeshVariable

if TYPE_CHECKING:
    from dynamo_dist.torch_compat import InstructionTranslatorBase, VariableTracker


def _construct(tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]) -> object:
    """The op that these constants make; None leaves others to upstream."""
    if len(args) != 1 or kwargs:
        return None
    try:
        value = dynamo_building.python_object(args[0])
    except NotImplementedError:
        return None
    return dynamo_building.build_unchanging(tx, dist.ReduceOp(value))


def reduce_op_patches() -> list[Patch]:
    """List the patches that enabling makes for the class."""
    return dynamo_trackers.on_construction(dist.ReduceOp, _construct)


CONSTANT_DUNDERS = frozenset({"__eq__", "__ne__", "__hash__", "__repr__", "__str__", "__format__"})


class PlacementVariable(dynamo_trackers.PlacementTracker):
    """A placement, torch's own or a subclass of the user's."""

    def attribute(self, tx: InstructionTranslatorBase, name: str) -> Any:
        if is_torchs_own(self.real) and not hasattr(self.real, name):
            dynamo_building.missing_attribute(tx, self.real, name)
        if (value := self._constant_property(name)) is not None:
            return dynamo_building.build(tx, value)
        if not self._is_constant_method(name):
            return None
        return dynamo_building.build_callable(
            lambda *args, **kwargs: self.call_method(tx, name, list(args), kwargs)
        )

    def method(self, tx: object, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if not self._is_constant_method(name):
            return None
        if (values := dynamo_building.constants(args, kwargs)) is None:
            return None
        return dynamo_building.build(tx, getattr(self.real, name)(*values[0], **values[1]))

    def _is_constant_method(self, name: str) -> bool:
        """Torch's own cannot change: their methods are constants of it and of constant
        arguments.
        """
        if not is_torchs_own(self.real) or (name.startswith("__") and name not in CONSTANT_DUNDERS):
            return False
        return callable(getattr(self.real, name, None))

    def _constant_property(self, name: str) -> int | str | None:
        """Return the number or string of a property that a class of torch defines, else None.

        An example is ``split_factor``, which reads C++. Upstream traces such a property in no
        placement that the program makes, and a strided shard's in none at all.
        """
        definers = (cls for cls in type(self.real).__mro__ if name in vars(cls))
        definer = next(definers, object)
        if not _is_torchs(definer) or not isinstance(vars(definer)[name], property):
            return None
        value = getattr(self.real, name)
        return value if type(value) in (int, str) else None

    def has_attribute(self, tx: InstructionTranslatorBase, name: str) -> bool | None:
        return attributes.has_attribute(self.real, name)

    def text(self, tx: InstructionTranslatorBase, name: str) -> object:
        # What torch's own print is what they compare; a subclass's text is the user's code.
        return (
            dynamo_building.build(tx, getattr(self.real, name)())
            if is_torchs_own(self.real)
            else None
        )


def is_torchs_own(placement: Placement) -> bool:
    """Return whether torch defines this class: its objects then cannot change."""
    return _is_torchs(type(placement))


def _is_torchs(cls: type) -> bool:
    return cls.__module__.startswith(("torch.distributed.tensor", "torch._C._distributed"))


def copied(
    tx: InstructionTranslatorBase, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> object:
    """``copy.copy`` and ``copy.deepcopy``: an equal placement; a mesh itself, which cannot change
    either.

    None leaves other things to upstream.
    """
    value = dynamo_building.realized(args[0]) if args else None
    if isinstance(value, PlacementVariable):  # deepcopy() passes itself a memo
        return dynamo_building.build(tx, copy.copy(value.as_python_constant()))
    return value if isinstance(value, DeviceMeshVariable) else None


def load(tracker: Any) -> tuple[object, bool]:
    """Tell how the compiled function gets a placement that was made while tracing: itself, or how
    to make it.

    Torch's own cannot change and are shared; a subclass may hold state, so each call makes a new
    one.
    """
    value: Any = tracker.real
    made_by = dynamo_trackers.made_by(tracker)
    if made_by is None or is_torchs_own(value):
        return value, False
    args, kwargs = made_by
    return (lambda: type(value)(*args, **kwargs)), True


def patches() -> list[Patch]:
    """List the changes that enabling this tracker makes, besides tracking the type."""
    return [
        *dynamo_trackers.on_codegen(PlacementVariable, load),
        *dynamo_trackers.on_function(copy.copy, copied),
        *dynamo_trackers.on_function(copy.deepcopy, copied),
    ]
