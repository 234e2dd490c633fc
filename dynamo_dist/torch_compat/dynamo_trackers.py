"""Dynamo's trackers of groups, meshes and placements, extended and put in place of upstream's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch._dynamo.config as _dynamo_config
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import TypeSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._library.fake_class_registry import FakeScriptObject

from dynamo_dist.torch_compat.dynamo_building import (
    _OPAQUE,
    _OPAQUE_CLASS,
    build,
    constants,
    unwrap,
)
from dynamo_dist.torch_compat.dynamo_calls import Members
from dynamo_dist.torch_compat.dynamo_guards import guard_source
from dynamo_dist.torch_compat.patching import (
    _MISSING,
    Patch,
    SetAttribute,
    SetItem,
    Upstream,
    WrapFunction,
)


class Tracker:
    """Stands before an upstream tracker in the bases: our hooks first, then upstream's rules.

    A hook that returns None leaves the case to upstream. Attribute access is ``var_getattr`` up to
    2.13 and ``tp_getattro_impl`` from 2.14 on. Text and equality were renamed in the same way; here
    each is one hook. Guards are the hooks' own business.
    """

    source: Any
    value: Any

    @property
    def real(self) -> Any:
        """The object itself; no guard is installed."""
        return unwrap(self.value)

    def attribute(self, tx: Any, name: str) -> Any:
        """Hook: the tracker of ``real.name``, or None."""
        return None

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Hook: the result of ``real.name(...)``, or None."""
        return None

    def has_attribute(self, tx: Any, name: str) -> bool | None:
        """Hook: ``hasattr(real, name)``, or None."""
        return None

    def text(self, tx: Any, name: str) -> Any:
        """Hook: the tracker of ``real.__repr__()`` or ``real.__str__()``, or None."""
        return None

    def guard_identity(self) -> None:
        """Hook: called when upstream is about to look at which object this is."""

    def var_getattr(self, tx: Any, name: str) -> Any:
        found = self.attribute(tx, name)
        return super().var_getattr(tx, name) if found is None else found  # type: ignore[misc]

    def tp_getattro_impl(self, tx: Any, name: str) -> Any:
        found = self.attribute(tx, name)
        return super().tp_getattro_impl(tx, name) if found is None else found  # type: ignore[misc]

    def call_method(self, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        found = self.method(tx, name, list(args), kwargs)
        if found is not None:
            return found
        return super().call_method(tx, name, args, kwargs)  # type: ignore[misc]

    def mp_subscript_impl(self, tx: Any, key: VariableTracker) -> Any:
        found = self.method(tx, "__getitem__", [key], {})
        return super().mp_subscript_impl(tx, key) if found is None else found  # type: ignore[misc]

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        found = self.has_attribute(tx, name)
        if found is None:
            return super().call_obj_hasattr(tx, name)  # type: ignore[misc]
        # The answer is a constant of the graph: an object that gains the attribute needs another
        # one.
        guard_source(self.source, functools.partial(GuardBuilder.HASATTR, attr=name))
        return ConstantVariable.create(found)

    def python_type(self) -> type:
        return type(self.real)

    def _text(self, tx: Any, name: str, upstream: str) -> Any:
        found = self.text(tx, name)
        return getattr(super(), upstream)(tx) if found is None else found

    def repr_impl(self, tx: Any) -> Any:
        return self._text(tx, "__repr__", "repr_impl")

    def str_impl(self, tx: Any) -> Any:
        return self._text(tx, "__str__", "str_impl")

    def tp_repr_impl(self, tx: Any) -> Any:
        return self._text(tx, "__repr__", "tp_repr_impl")

    def tp_str_impl(self, tx: Any) -> Any:
        return self._text(tx, "__str__", "tp_str_impl")

    def as_python_constant(self) -> Any:
        self.guard_identity()
        return self.real

    def is_python_constant(self) -> bool:
        return True  # upstream asks by trying ``as_python_constant``, which would install the guard

    def get_real_python_backed_value(self) -> object:
        self.guard_identity()
        return self.real

    def hash_impl(self, tx: Any) -> Any:
        self.guard_identity()
        return hash(self.real), False

    def is_python_equal(self, other: object) -> bool:
        self.guard_identity()
        return bool(self.real == other.as_python_constant())  # type: ignore[attr-defined]


def _with_upstream(upstream: Any) -> Any:
    return type(f"{upstream.__name__}WithHooks", (Tracker, upstream), {"__module__": __name__})


GroupTracker: Any = _with_upstream(_OPAQUE)
MeshTracker: Any = _with_upstream(_OPAQUE)
PlacementTracker: Any = _with_upstream(_OPAQUE)


def retrack(trackers: Mapping[type, type]) -> list[Patch]:
    """Let upstream build its trackers of the given types, then make each an instance of ours.

    ``trackers`` maps a traced type (subclasses included, first match wins) to a tracker that
    derives from ``GroupTracker`` and so on. Upstream keeps the guards, the graph input and the fake
    object: a tracker made from nothing lacks them as soon as its object must become a graph input.
    In an exported program an object that is reached in two ways is one, as in upstream.
    """
    ours = set(trackers.values())
    replaced = {
        tracker.__mro__[tracker.__mro__.index(Tracker) + 1] for tracker in trackers.values()
    }

    def init(upstream: Upstream, self: Any, *args: Any, **kwargs: Any) -> None:
        upstream(self, *args, **kwargs)
        # Exactly upstream's class: a tracker that is ours by now, or a subclass of somebody else,
        # stays.
        if type(self) in replaced:
            real = unwrap(self.value)
            for traced, tracker in trackers.items():
                if isinstance(real, traced):
                    self.__class__ = tracker
                    break
            if isinstance(self.proxy, FakeScriptObject):
                # 2.13 leaves the stand-in of a placement of an intermediate DTensor in the graph.
                self.value, self.proxy = real, real
            if self.source is not None and getattr(self, "cls_source", _MISSING) is None:
                self.cls_source = TypeSource(
                    self.source
                )  # up to 2.14 upstream sets ``source`` too late

    def is_one_input(upstream_one: Any, self: Any, tracker: object) -> Any:
        # Upstream looks at the class itself; ours stands for the one behind it. Outside of
        # export, upstream does not always guard that two ways lead to one object, and guards on
        # hooks are ours.
        if not self.tx.export or type(tracker) not in ours:
            return upstream_one(self, tracker)
        # Upstream compares ``type(tracker)``; an empty instance of its own class is all that it
        # looks at.
        behind = next(each for each in type(tracker).__mro__ if each in replaced)
        return upstream_one(self, object.__new__(behind))

    return [
        WrapFunction(_OPAQUE, "__init__", init),
        WrapFunction(VariableBuilder, "_can_lift_attrs_to_inputs", is_one_input),
    ]


def extend_class_tracker(has_attribute: Callable[[Any, str], bool | None]) -> list[Patch]:
    """``hasattr(cls, name)`` and ``cls == other`` for classes of opaque objects, where upstream
    breaks.

    ``has_attribute(cls, name)`` is None for a class that is left to upstream, in both cases.
    """
    owner = _OPAQUE_CLASS
    compare = next(n for n in ("tp_richcompare_impl", "richcompare_impl") if hasattr(owner, n))

    def call_obj_hasattr(upstream: Upstream, self: Any, tx: Any, name: str) -> Any:
        found = has_attribute(self.value, name)
        return upstream(self, tx, name) if found is None else ConstantVariable.create(found)

    def richcompare(upstream: Upstream, self: Any, tx: Any, other: VariableTracker, op: str) -> Any:
        # Only classes that ``has_attribute`` knows are compared here; others are upstream's to
        # break on.
        known = has_attribute(self.value, "__eq__") is not None and op in ("__eq__", "__ne__")
        if not known or (values := constants([other], {})) is None:
            return upstream(self, tx, other, op)
        return ConstantVariable.create(getattr(type(self.value), op)(self.value, values[0][0]))

    return [
        WrapFunction(owner, "call_obj_hasattr", call_obj_hasattr),
        SetAttribute(owner, "is_python_equal", _is_same_class),  # as keys of dictionaries
        WrapFunction(owner, compare, richcompare),
    ]


def _is_same_class(self: Any, other: Any) -> bool:
    return self.value is other.as_python_constant()


def extend_builtins() -> list[Patch]:
    """``str`` and ``isinstance`` of our trackers, where upstream looks at the stand-in.

    Upstream prints an opaque object's stand-in up to 2.13, and from 2.15 on asks ``isinstance``
    which object it is, which would guard its identity.
    """

    def call_str(upstream: Upstream, self: Any, tx: Any, arg: Any) -> Any:
        found = arg.text(tx, "__str__") if isinstance(arg, Tracker) else None
        return upstream(self, tx, arg) if found is None else found

    def call_isinstance(
        upstream: Upstream, self: Any, tx: Any, arg: Any, classes: VariableTracker
    ) -> Any:
        values = constants([classes], {}) if isinstance(arg, Tracker) else None
        if values is None:
            return upstream(self, tx, arg, classes)
        return build(tx, isinstance(arg.real, values[0][0]))

    return [
        WrapFunction(BuiltinVariable, "call_str", call_str),
        WrapFunction(BuiltinVariable, "call_isinstance", call_isinstance),
    ]


class ConstantTracker(Members, VariableTracker):
    """An object known while tracing that no upstream tracker fits."""

    def __init__(self, value: object, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value = value

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        return ConstantVariable.create(hasattr(self.value, name))

    def python_type(self) -> type:
        return type(self.value)

    def as_python_constant(self) -> Any:
        return self.value

    def reconstruct(self, codegen: PyCodegen) -> None:
        _load_object(codegen, self.value)


def _load_object(codegen: PyCodegen, value: object) -> None:
    # A global by the object's id: the compiled code loads the object itself, not a copy of it.
    name = codegen.tx.output.install_global_by_id("__dynamo_dist_constant", value)
    codegen.append_output(codegen.create_load_global(name, add=True))


class FunctionTracker(VariableTracker):
    """A function whose calls we answer: ``answer(tx, args, kwargs)`` gives a tracker or None.

    On None the call goes to ``upstream``, the function's upstream tracker.
    """

    def __init__(
        self, function: Callable[..., object], answer: Any, upstream: Any, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.function, self.answer, self.upstream = function, answer, upstream

    def python_type(self) -> type:
        return type(self.function)

    def as_python_constant(self) -> Any:
        return self.function

    def call_function(self, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        found = self.answer(tx, list(args), kwargs)
        return self.upstream.call_function(tx, args, kwargs) if found is None else found


def on_function(function: Any, answer: Callable[..., Any]) -> list[Patch]:
    """Answer calls of one function by ``FunctionTracker``; upstream builds its own tracker and
    guards.

    Answers add up: the one that came last is asked first.
    """

    def track(builder: Any, upstream: Any) -> Any:
        return FunctionTracker(function, answer, upstream, source=builder.source)

    return [_on_upstream_tracker(function, track)]


def on_construction(cls: type, answer: Callable[..., Any]) -> list[Patch]:
    """``cls(...)`` while tracing, where ``answer(tx, args, kwargs)`` is not None; else
    upstream's tracker has it.
    """

    def track(_: object, upstream: Any) -> Any:
        kind: Any = type(upstream)
        upstream.__class__ = _answering(kind, answer)
        return upstream

    return [_on_upstream_tracker(cls, track)]


@functools.cache
def _answering(upstream: Any, answer: Callable[..., Any]) -> Any:
    """A tracker of a class, whose calls we answer."""

    def call_function(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        found = answer(tx, list(args), kwargs)
        return upstream.call_function(self, tx, args, kwargs) if found is None else found

    members = {"__module__": __name__, "call_function": call_function}
    return type(f"{upstream.__name__}WithAnswer", (upstream,), members)


def _on_upstream_tracker(value: object, track: Callable[[Any, Any], Any]) -> Patch:
    def wrap(builder: Any, _: Any) -> Any:
        patch.undo()
        try:
            upstream = builder._wrap(value)
        finally:
            patch.apply()
        return track(builder, upstream)

    patch = on_object(value, wrap)
    return patch


def on_object(value: object, make: Callable[[Any, object], object]) -> Patch:
    """Track one function, class or object of torch by ``make(builder, value)``, wherever a
    program reads it.
    """
    return SetItem(VariableBuilder._id_dispatch(), id(value), make, of=value)


def on_values(
    cls: type, matches: Callable[[Any], bool], make: Callable[[Any, Any, Any], Any]
) -> list[Patch]:
    """Track what comes from outside, is of ``cls`` and matches by ``make(tx, value, source)``;
    None leaves it to upstream.
    """

    def wrap(upstream: Upstream, self: Any, value: Any) -> Any:
        is_ours = isinstance(value, cls) and matches(value)
        found = make(self.tx, value, self.source) if is_ours else None
        return upstream(self, value) if found is None else found

    return [WrapFunction(VariableBuilder, "_wrap", wrap)]


def retrack_values(cls: type, tracker: type[VariableTracker]) -> list[Patch]:
    """Let upstream track what comes from outside and is of ``cls``, then make its tracker an
    instance of ``tracker``, a subclass of upstream's.
    """

    def wrap(upstream: Upstream, self: Any, value: Any) -> Any:
        found = upstream(self, value)
        # Exactly upstream's class: a subclass of somebody else stays.
        if isinstance(value, cls) and type(found) is tracker.__base__:
            found.__class__ = tracker
        return found

    return [WrapFunction(VariableBuilder, "_wrap", wrap)]


def constant_node(function: Callable[..., Any], *args: Any) -> Any:
    """A node of the graph that calls ``function(*args)``, whose result stays the same."""
    tx: Any = InstructionTranslator.current_tx()
    proxy = tx.output.create_proxy("call_function", function, args, {})
    proxy.node.meta["example_value"] = function(*args)
    return proxy


def keep_no_fake_results() -> None:
    """Have torch keep no fake results of operators, in this trace and in the compile of its
    graph.
    """
    tx: Any = InstructionTranslator.current_tx()
    tx.fake_mode.cache_enabled = False
    configured = _dynamo_config.patch(fake_tensor_cache_enabled=False)
    configured.__enter__()
    tx.output.add_cleanup_hook(lambda: configured.__exit__(None, None, None))


def on_codegen(tracker: object, load: Callable[[Any], tuple[Any, bool]]) -> list[Patch]:
    """Load sourceless values of ``tracker`` from a global instead of returning them from the graph.

    ``load(value)`` gives an object and False, or a function and True; the compiled function then
    calls it, every time it runs, for a new object.
    """

    def call(upstream: Upstream, self: Any, value: Any, allow_cache: bool = True) -> None:
        if type(value) is not tracker or value.source is not None:
            upstream(self, value, allow_cache)
            return
        loaded, is_factory = load(value)
        if is_factory:
            self.add_push_null(lambda: _load_object(self, loaded))
            self.extend_output(create_call_function(0, False))
        else:
            _load_object(self, loaded)
        self.clear_tos()

    return [WrapFunction(PyCodegen, "__call__", call)]


def made_by(tracker: VariableTracker) -> Any:
    """The arguments, by position and by name, with which a traced program made an object; None
    for any other.
    """
    return getattr(tracker, "ctor_args_kwargs", None)
