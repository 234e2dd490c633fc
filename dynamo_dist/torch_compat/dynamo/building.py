"""Steps that a tracker may take while tracing: build values, read them, break the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed.distributed_c10d as _c10d
from torch._dynamo.exc import raise_observed_exception, unimplemented
from torch._dynamo.source import (
    AttrSource,
    DictGetItemSource,
    GetItemSource,
    GlobalSource,
    GlobalWeakRefSource,
    SkipGuardSource,
)
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import LambdaVariable
from torch._guards import TracingContext
from torch._library import opaque_object as _opaque

from dynamo_dist.torch_compat.changes import _MISSING
from dynamo_dist.torch_compat.dynamo.opaque import unwrap


def build(tx: Any, value: object, source: Any = None) -> Any:
    """The tracker of ``value``; with a source, guarded as stock guards it."""
    return VariableTracker.build(tx, value, source)


def attribute_source(tracker: Any, name: str) -> Any:
    """Return the source of ``tracker.name``; None if that of ``tracker`` is not known."""
    return AttrSource(tracker.source, name) if tracker.source is not None else None


def imported_source(tx: Any, module: str, *path: str) -> Any:
    """The source of ``module.path[0].path[1]...``."""
    source = tx.import_source(module)
    for name in path:
        source = AttrSource(source, name)
    return source


def default_group_source(tx: Any) -> Any:
    """The source of the default group: where c10d keeps it, not the properties that look there."""
    world = vars(_c10d).get("_world")
    path = ("_world", "_default_pg") if "_default_pg" in vars(world) else ("GroupMember", "WORLD")
    return imported_source(tx, _c10d.__name__, *path)


def build_by_weakref(tx: Any, value: object) -> Any:
    """The tracker of an object that no variable of the program holds; guarded: it is alive."""
    name = tx.store_global_weakref_by_id("__dynamo_dist", value)
    return VariableTracker.build(tx, value, GlobalWeakRefSource(name), realize=True)


def build_unchanging(tx: Any, value: object) -> Any:
    """The tracker of an object that outlives the code and does not change: nothing of it is guarded."""
    name = tx.output.install_global_by_id("__dynamo_dist", value)
    return VariableTracker.build(tx, value, SkipGuardSource(GlobalSource(name)), realize=True)


def member_source(source: Any, *path: str | int) -> Any:
    """The source of ``source.a[0].b`` for the path ("a", 0, "b")."""
    for name in path:
        source = AttrSource(source, name) if isinstance(name, str) else GetItemSource(source, name)
    return source


def build_item(tx: Any, tracker: Any, name: str, key: str) -> Any:
    """The tracker of ``tracker.name[key]``, ``name`` being a dictionary of the object's own."""
    value = vars(python_object(tracker))[name][key]
    source = attribute_source(tracker, name)
    return build(tx, value, None if source is None else DictGetItemSource(source, key))


def build_list(tx: Any, items: list[Any]) -> Any:
    """A new list of trackers, as the traced program makes one."""
    made = build(tx, [])
    for item in items:
        made.call_method(tx, "append", [item], {})
    return made


def build_dict(tx: Any, items: Mapping[str, Any]) -> Any:
    """A new dictionary of trackers by name, as the traced program makes one."""
    made = build(tx, {})
    for name, item in items.items():
        made.call_method(tx, "__setitem__", [build(tx, name), item], {})
    return made


def set_after_graph(tx: Any, tracker: Any, name: str, value: Any) -> None:
    """Have the compiled function set ``object.name`` when its graph has run; a property's setter is called then."""
    tx.output.side_effects.store_attr(tracker, name, value)


def build_callable(answer: Callable[..., Any]) -> Any:
    """A tracker that answers a call with ``answer(*args, **kwargs)``."""
    return LambdaVariable(answer)


def note_rank_dependent() -> None:
    """Say that the program asks for its rank: on another rank the graph may be another one."""
    TracingContext.get().dist_rank_dependent = True  # type: ignore[attr-defined]


def is_literal(value: object) -> bool:
    """Return whether stock's ``ConstantVariable`` may hold this value."""
    return bool(ConstantVariable.is_literal(value))


def is_stocks_member(tracker: Any, name: str) -> bool:
    """Return whether torch has registered this member of a mesh."""
    info = _opaque.get_opaque_obj_info(type(tracker.real))
    return info is not None and name in info.members


def is_inlined_member(value: object, name: str) -> bool:
    """Return whether torch registered this member as Python code to be traced, not as a constant."""
    info = _opaque.get_opaque_obj_info(type(value))
    return info is not None and info.members.get(name) is _opaque.MemberType.INLINED


def constants(
    args: list[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]] | None:
    """The arguments' values if all are constants while tracing; else None."""
    try:
        return (
            [arg.as_python_constant() for arg in args],
            {name: arg.as_python_constant() for name, arg in kwargs.items()},
        )
    except NotImplementedError:
        return None


def missing_attribute(tx: Any, value: object, name: str) -> NoReturn:
    """Raise, in the traced program, the AttributeError that eager raises."""
    message = f"{type(value).__name__!r} object has no attribute {name!r}"
    raise_observed_exception(AttributeError, tx, args=[message])
    raise AssertionError("raise_observed_exception returned")


def raise_in_program(tx: Any, error: Exception) -> NoReturn:
    """Raise ``error`` in the traced program, which may catch it."""
    raise_observed_exception(type(error), tx, args=[str(arg) for arg in error.args])
    raise AssertionError("raise_observed_exception returned")


def graph_break(kind: str, context: str, explanation: str, fix: str) -> NoReturn:
    """Break the graph. ``kind`` is fixed text, without names or shapes, so that breaks can be counted."""
    unimplemented(gb_type=kind, context=context, explanation=explanation, hints=[fix])
    raise AssertionError("unimplemented returned")


def fake_tensor(tracker: Any) -> torch.Tensor:
    """The stand-in of one tensor."""
    return realized(tracker).as_proxy().node.meta["example_value"]


def realized(tracker: Any) -> Any:
    """The tracker itself; a lazy one installs its guards."""
    return tracker.realize() if hasattr(tracker, "realize") else tracker


def call_traced(tx: Any, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Trace a plain Python function of ours as if the program had called it here."""
    return build(tx, function).call_function(tx, args, kwargs)


def items_of(tx: Any, tracker: Any) -> list[Any]:
    """The trackers in a traced list or tuple."""
    return [realized(item) for item in realized(tracker).unpack_var_sequence(tx)]


def python_object(tracker: Any) -> Any:
    """The object that a tracker stands for, without a guard; raises NotImplementedError for none."""
    tracker = realized(tracker)
    value = getattr(tracker, "value", _MISSING)
    return tracker.as_python_constant() if value is _MISSING else unwrap(value)


def value_of(tracker: Any) -> object:
    """The object that a tracker keeps, if it keeps one; no guard is installed."""
    return getattr(tracker, "value", None)
