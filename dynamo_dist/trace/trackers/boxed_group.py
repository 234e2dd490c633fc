"""A boxed process group, ``group.boxed()``: what a custom operator takes that is declared in TorchScript's types."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from dynamo_dist.torch_compat import c10d, dynamo_building, dynamo_guards, dynamo_trackers
from dynamo_dist.torch_compat.patching import Change
from dynamo_dist.trace.trackers import attributes

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
        # Torch keeps an operator's fake results by its arguments, and boxes have a hash but no equality.
        dynamo_trackers.keep_no_fake_results()
        return dynamo_trackers.constant_node(boxed, unboxed(self.value).group_name)


_GUARD = functools.partial(dynamo_guards.VALUE_MATCH, what="group", read=_name)


def from_outside(tx: Any, value: Any, source: Any) -> Any:
    """The tracker of a box that is an argument, an attribute or an item of something."""
    dynamo_guards.guard_source(source, _GUARD)
    return BoxedGroupVariable(value, source=source)


def boxed_group_changes() -> list[Change]:
    """List the changes that enabling makes for boxes from outside; ``group.boxed()`` is the group's own member."""
    return dynamo_trackers.on_values(torch.ScriptObject, is_boxed_group, from_outside)
