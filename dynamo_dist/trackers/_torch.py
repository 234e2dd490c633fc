"""Private torch names that trackers need: stock trackers, their protocol, guards, sources."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch._dynamo.guards as _guards
import torch.compiler.config as _compiler_config
import torch.distributed.distributed_c10d as _c10d
from torch._dynamo.bytecode_transformation import create_call_function
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.exc import raise_observed_exception, unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import (
    AttrSource,
    CallFunctionNoArgsSource,
    GlobalWeakRefSource,
    TypeSource,
    is_constant_source,
)
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable
from torch._dynamo.variables.misc import LambdaVariable
from torch._guards import TracingContext
from torch._library import opaque_object as _opaque
from torch._library.fake_class_registry import FakeScriptObject
from torch._logging._internal import log_registry as _log_registry
from torch.utils._python_dispatch import _disable_current_modes

from dynamo_dist._torch import _MISSING, SetAttribute, SetItem, WrapAttribute, same_or
from dynamo_dist._torch import Change as Change


def _optional(module: str, *names: str) -> Any:
    """The first of ``names`` that ``module`` has; None if it has none of them."""
    found = importlib.import_module(module)
    return next((getattr(found, name) for name in names if hasattr(found, name)), None)


def probes() -> dict[str, bool]:
    """Tell what this torch has, by the names that ``doctor`` explains."""
    entry = _compiler_config._config["cache_key_tag"]  # type: ignore[attr-defined]
    return {
        "opaque_types": HAS_OPAQUE_TYPES,
        "custom_class_names": _OPAQUE is not None and _OPAQUE.__name__.startswith("CustomClass"),
        "getattro_protocol": HAS_GETATTRO_PROTOCOL,
        "config_per_thread": hasattr(entry.user_override, "get"),
        "subgraph_reuse": hasattr(_guards, "GUARD_VALUE_DISPATCH"),
        "short_log_names": _log_registry.is_log("dist"),
    }


# One opaque-object tracker for all three from 2.12 on (renamed in 2.14), a class for each in 2.11.
_OPAQUE = _optional(
    "torch._dynamo.variables.script_object",
    "CustomClassObjectVariable",  # 2.14
    "TorchScriptObjectVariable",
)
_OPAQUE_CLASS = _optional(
    "torch._dynamo.variables.script_object",
    "CustomClassVariable",  # 2.14
    "OpaqueObjectClassVariable",
)
_DISTRIBUTED = "torch._dynamo.variables.distributed"
_STOCK_GROUP = _optional(_DISTRIBUTED, "ProcessGroupVariable")
_STOCK_MESH = _optional(_DISTRIBUTED, "DeviceMeshVariable")
_STOCK_PLACEMENT = _optional(_DISTRIBUTED, "PlacementVariable")
_STOCK_PLACEMENT_CLASS = _optional(_DISTRIBUTED, "PlacementClassVariable")

HAS_OPAQUE_TYPES = _STOCK_GROUP is None
# Up to 2.11 or 2.12 a HASATTR guard is made of the attribute's source, later of the object's.
_HASATTR_NAMES_ITSELF = "attr" in inspect.signature(GuardBuilder.HASATTR).parameters
HAS_GETATTRO_PROTOCOL = hasattr(VariableTracker, "tp_getattro_impl")


class Tracker:
    """Stands before a stock tracker in the bases: our hooks first, then stock's rules.

    A hook that returns None leaves the case to stock. Attribute access is ``var_getattr`` up to 2.13
    and ``tp_getattro_impl`` from 2.14 on, text and equality were renamed likewise, and up to 2.12 a
    hash is asked for by another name; here each is one hook. Guards are the hooks' own business.
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
        """Hook: called when stock is about to look at which object this is."""

    def var_getattr(self, tx: Any, name: str) -> Any:
        found = self.attribute(tx, name)
        return super().var_getattr(tx, name) if found is None else found  # type: ignore[misc]

    def tp_getattro_impl(self, tx: Any, name: str) -> Any:
        found = self.attribute(tx, name)
        return super().tp_getattro_impl(tx, name) if found is None else found  # type: ignore[misc]

    def call_method(self, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        found = self.method(tx, name, list(args), kwargs)
        return super().call_method(tx, name, args, kwargs) if found is None else found  # type: ignore[misc]

    def mp_subscript_impl(self, tx: Any, key: Any) -> Any:
        found = self.method(tx, "__getitem__", [key], {})
        return super().mp_subscript_impl(tx, key) if found is None else found  # type: ignore[misc]

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        found = self.has_attribute(tx, name)
        if found is None:
            return super().call_obj_hasattr(tx, name)  # type: ignore[misc]
        if _HASATTR_NAMES_ITSELF:
            guard_source(self.source, functools.partial(GuardBuilder.HASATTR, attr=name))
        else:
            guard_source(attribute_source(self, name), GuardBuilder.HASATTR)
        return ConstantVariable.create(found)

    def python_type(self) -> type:
        return type(self.real)

    def _text(self, tx: Any, name: str, stock: str) -> Any:
        found = self.text(tx, name)
        return getattr(super(), stock)(tx) if found is None else found

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
        return True  # stock asks by trying ``as_python_constant``, which would install the guard

    def get_real_python_backed_value(self) -> object:
        self.guard_identity()
        return self.real

    def hash_impl(self, tx: Any) -> Any:
        self.guard_identity()
        return hash(self.real), False

    def is_python_hashable(self) -> bool:
        return True

    def get_python_hash(self) -> int:
        self.guard_identity()
        return hash(self.real)

    def is_python_equal(self, other: object) -> bool:
        self.guard_identity()
        return bool(self.real == other.as_python_constant())  # type: ignore[attr-defined]


def _with_stock(stock: Any) -> Any:
    return type(f"{stock.__name__}WithHooks", (Tracker, stock), {"__module__": __name__})


GroupTracker: Any = _with_stock(_STOCK_GROUP or _OPAQUE)
MeshTracker: Any = _with_stock(_STOCK_MESH or _OPAQUE)
PlacementTracker: Any = _with_stock(_STOCK_PLACEMENT or _OPAQUE)


def unwrap(value: Any) -> Any:
    """The object that Dynamo's stand-in for an opaque object stands for; other values as they are."""
    return value.real_obj if isinstance(value, FakeScriptObject) else value


def retrack(trackers: Mapping[type, type]) -> list[Change]:
    """Let stock build its trackers of the given types, then make each an instance of ours.

    ``trackers`` maps a traced type (subclasses included, first match wins) to a tracker that derives
    from ``GroupTracker`` and so on. Stock keeps the guards, the graph input and the fake object: a
    tracker made from nothing lacks them as soon as its object must become a graph input. In an exported
    program an object that is reached in two ways is one, as in stock.
    """
    ours = set(trackers.values())
    stock = {tracker.__mro__[tracker.__mro__.index(Tracker) + 1] for tracker in trackers.values()}
    owner: Any = _OPAQUE if HAS_OPAQUE_TYPES else _STOCK_GROUP.__mro__[1]
    stock_init = owner.__init__

    @functools.wraps(stock_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        if type(self) in stock:
            real = unwrap(self.value)
            for traced, tracker in trackers.items():
                if isinstance(real, traced):
                    self.__class__ = tracker
                    break
            if HAS_OPAQUE_TYPES and isinstance(self.proxy, FakeScriptObject):
                # 2.13 leaves the stand-in of a placement of an intermediate DTensor in the graph.
                self.value, self.proxy = real, real
            if self.source is not None and getattr(self, "cls_source", _MISSING) is None:
                self.cls_source = TypeSource(
                    self.source
                )  # up to 2.14 stock sets ``source`` too late

    def one_each(stock_one: Any) -> Any:
        @functools.wraps(stock_one)
        def is_one_input(self: Any, tracker: Any) -> Any:
            # Stock looks at the class itself; ours stands for the one behind it. Outside of export, stock
            # does not always guard that two ways lead to one object, and guards on hooks are ours.
            if not self.tx.export or type(tracker) not in ours:
                return stock_one(self, tracker)
            behind = next(each for each in type(tracker).__mro__ if each in stock)
            return stock_one(self, object.__new__(behind))

        return is_one_input

    return [
        SetAttribute(owner, "__init__", init),
        WrapAttribute(VariableBuilder, "_can_lift_attrs_to_inputs", one_each),
    ]


def extend_class_tracker(has_attribute: Callable[[Any, str], bool | None]) -> list[Change]:
    """``hasattr(cls, name)`` and ``cls == other`` for classes of opaque objects, where stock breaks.

    ``has_attribute(cls, name)`` is None for a class that is left to stock, in both cases.
    """
    owner = _OPAQUE_CLASS if HAS_OPAQUE_TYPES else _STOCK_PLACEMENT_CLASS
    compare = next(
        n for n in ("tp_richcompare_impl", "richcompare_impl", "") if hasattr(owner, n) or not n
    )
    stock_hasattr, stock_compare = owner.call_obj_hasattr, getattr(owner, compare, None)

    @functools.wraps(stock_hasattr)
    def call_obj_hasattr(self: Any, tx: Any, name: str) -> Any:
        found = has_attribute(self.value, name)
        return stock_hasattr(self, tx, name) if found is None else ConstantVariable.create(found)

    def richcompare(self: Any, tx: Any, other: Any, op: str) -> Any:
        known = has_attribute(self.value, "__eq__") is not None and op in ("__eq__", "__ne__")
        if not known or (values := constants([other], {})) is None:
            return stock_compare(self, tx, other, op)  # type: ignore[misc]
        return ConstantVariable.create(getattr(type(self.value), op)(self.value, values[0][0]))

    changes: list[Change] = [SetAttribute(owner, "call_obj_hasattr", call_obj_hasattr)]
    if (
        HAS_OPAQUE_TYPES
    ):  # as keys of dictionaries; 2.11 knows how, and from 2.13 on stock hashes them
        changes.append(SetAttribute(owner, "is_python_equal", _is_same_class))
    if HAS_OPAQUE_TYPES and hasattr(owner, "get_python_hash"):
        changes.append(SetAttribute(owner, "get_python_hash", lambda self: hash(self.value)))
        changes.append(SetAttribute(owner, "is_python_hashable", lambda self: True))
    if stock_compare is not None:
        changes.append(SetAttribute(owner, compare, functools.wraps(stock_compare)(richcompare)))
    elif hasattr(owner, "get_real_python_backed_value"):  # 2.12 compares classes by it, or breaks
        changes.append(SetAttribute(owner, "get_real_python_backed_value", lambda self: self.value))
    return changes


def _is_same_class(self: Any, other: Any) -> bool:
    return self.value is other.as_python_constant()


def on_class_call(cls: type, answer: Callable[..., Any]) -> list[Change]:
    """Answer ``cls(...)`` while tracing by ``answer(tx, args, kwargs)``, for a class of opaque objects."""
    if "call_function" not in vars(_OPAQUE_CLASS or object):  # 2.11, where no class is
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def call(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            if self.value is cls:
                return answer(tx, list(args), kwargs)
            return stock(self, tx, args, kwargs)

        return call

    return [WrapAttribute(_OPAQUE_CLASS, "call_function", changed)]


def extend_builtins() -> list[Change]:
    """``str``, ``hash``, ``type`` and ``isinstance`` of our trackers, where stock looks at the stand-in or breaks.

    Stock prints an opaque object's stand-in up to 2.13, has no ``hash`` of one up to 2.12, and from 2.15 on
    asks ``isinstance`` which object it is, which would guard its identity. Up to 2.11 the class of an object
    that was made while tracing gets another kind of tracker than the class by its name, and so is never it.
    """

    def answer_str(tx: Any, arg: Any) -> Any:
        return arg.text(tx, "__str__")

    def answer_hash(tx: Any, arg: Any) -> Any:
        arg.guard_identity()
        return build(tx, hash(arg.real))

    def answer_isinstance(tx: Any, arg: Any, classes: Any) -> Any:
        values = constants([classes], {})
        return None if values is None else build(tx, isinstance(arg.real, values[0][0]))

    def answer_type(tx: Any, arg: Any) -> Any:
        cls = type(arg.real)
        named = getattr(importlib.import_module(cls.__module__), cls.__qualname__, None)
        if HAS_OPAQUE_TYPES or arg.source is not None or named is not cls:
            return None
        return build(tx, cls, imported_source(tx, cls.__module__, cls.__qualname__))

    return [
        SetAttribute(BuiltinVariable, name, _answered(getattr(BuiltinVariable, name, None), answer))
        for name, answer in (
            ("call_str", answer_str),
            ("call_hash", answer_hash),
            ("call_type", answer_type),
            ("call_isinstance", answer_isinstance),
        )
    ]


def _answered(stock: Any, answer: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, tx: Any, arg: Any, *others: Any) -> Any:
        is_ours = isinstance(arg, Tracker)
        found = answer(tx, arg.realize(), *others) if is_ours else None
        return stock(self, tx, arg, *others) if found is None and stock is not None else found

    return functools.wraps(stock)(call) if stock is not None else call


class ConstantTracker(VariableTracker):
    """An object known while tracing that no stock tracker fits; its members are the subclass's hooks."""

    def __init__(self, value: object, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value = value

    def attribute(self, tx: Any, name: str) -> Any:
        """Hook: the tracker of ``value.name``."""
        raise NotImplementedError

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Hook: the result of ``value.name(...)``."""
        raise NotImplementedError

    def var_getattr(self, tx: Any, name: str) -> Any:
        return self.attribute(tx, name)

    def tp_getattro_impl(self, tx: Any, name: str) -> Any:
        return self.attribute(tx, name)

    def call_method(self, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.method(tx, name, list(args), kwargs)

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        return ConstantVariable.create(hasattr(self.value, name))

    def python_type(self) -> type:
        return type(self.value)

    def as_python_constant(self) -> Any:
        return self.value

    def reconstruct(self, codegen: Any) -> None:
        _load_object(codegen, self.value)


def _load_object(codegen: Any, value: object) -> None:
    name = codegen.tx.output.install_global_by_id("__dynamo_dist_constant", value)
    codegen.append_output(codegen.create_load_global(name, add=True))


class FunctionTracker(VariableTracker):
    """A function whose calls we answer: ``answer(tx, args, kwargs)`` gives a tracker or None.

    On None the call goes to ``stock``, the function's stock tracker.
    """

    def __init__(self, function: Any, answer: Any, stock: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function, self.answer, self.stock = function, answer, stock

    def python_type(self) -> type:
        return type(self.function)

    def as_python_constant(self) -> Any:
        return self.function

    def call_function(self, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        found = self.answer(tx, list(args), kwargs)
        return self.stock.call_function(tx, args, kwargs) if found is None else found


def on_function(function: Any, answer: Callable[..., Any]) -> list[Change]:
    """Answer calls of one function by ``FunctionTracker``; stock builds its own tracker and guards."""
    table = VariableBuilder._id_dispatch()

    def wrap(builder: Any, value: Any) -> Any:
        del table[id(function)]
        try:
            stock = builder._wrap(value)
        finally:
            table[id(function)] = wrap
        return FunctionTracker(value, answer, stock, source=builder.source)

    return [SetItem(table, id(function), wrap, of=function)]


def on_values(
    cls: type, matches: Callable[[object], bool], make: Callable[[Any, Any, Any], Any]
) -> list[Change]:
    """Track what comes from outside, is of ``cls`` and matches by ``make(tx, value, source)``."""

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def wrap(self: Any, value: Any) -> Any:
            if isinstance(value, cls) and matches(value):
                return make(self.tx, value, self.source)
            return stock(self, value)

        return wrap

    return [WrapAttribute(VariableBuilder, "_wrap", changed)]


def constant_node(function: Callable[..., Any], *args: Any) -> Any:
    """A node of the graph that calls ``function(*args)``, whose result stays the same."""
    tx: Any = InstructionTranslator.current_tx()
    proxy = tx.output.create_proxy("call_function", function, args, {})
    proxy.node.meta["example_value"] = function(*args)
    return proxy


def on_codegen(tracker: Any, load: Callable[[Any], tuple[Any, bool]]) -> list[Change]:
    """Load sourceless values of ``tracker`` from a global instead of returning them from the graph.

    ``load(value)`` gives an object and False, or a function and True; the compiled function then calls
    it, every time it runs, for a new object.
    """
    stock: Any = PyCodegen.__call__

    @functools.wraps(stock)
    def call(self: Any, value: Any, allow_cache: bool = True) -> None:
        if type(value) is not tracker or value.source is not None:
            return stock(self, value, allow_cache)
        loaded, is_factory = load(value)
        if is_factory:
            self.add_push_null(lambda: _load_object(self, loaded))
            self.extend_output(create_call_function(0, False))
        else:
            _load_object(self, loaded)
        self.clear_tos()

    return [SetAttribute(PyCodegen, "__call__", call)]


# --- What a tracker's hook may do -----------------------------------------------------------------

# The group registered under a name; raises if there is none.
resolve_process_group: Callable[[str], Any] = vars(_c10d)["_resolve_process_group"]
group_tag: Callable[[Any], str] = vars(_c10d)["_get_group_tag"]


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


def build_type(tx: Any, tracker: Any) -> Any:
    """The tracker of ``type(object)``, as the program gets it from ``type``."""
    return build(tx, type).call_function(tx, [tracker], {})


def build_by_weakref(tx: Any, value: object) -> Any:
    """The tracker of an object that no variable of the program holds; guarded: it is alive."""
    name = tx.store_global_weakref_by_id("__dynamo_dist", value)
    return VariableTracker.build(tx, value, GlobalWeakRefSource(name), realize=True)


def build_list(tx: Any, items: list[Any]) -> Any:
    """A new list of trackers, as the traced program makes one."""
    made = build(tx, [])
    for item in items:
        made.call_method(tx, "append", [item], {})
    return made


def build_callable(answer: Callable[..., Any]) -> Any:
    """A tracker that answers a call with ``answer(*args, **kwargs)``."""
    return LambdaVariable(answer)


def note_rank_dependent() -> None:
    """Say that the program asks for its rank: on another rank the graph may be another one."""
    TracingContext.get().dist_rank_dependent = True  # type: ignore[attr-defined]


def is_literal(value: object) -> bool:
    """Return whether stock's ``ConstantVariable`` may hold this value."""
    return bool(ConstantVariable.is_literal(value))


_MESH_MEMBERS_OF_2_11 = frozenset(
    "ndim device_type mesh_dim_names size get_coordinate get_rank get_local_rank get_group _flatten "
    "_is_current_rank_part_of_mesh _get_or_create_default_group _sym_get_coordinate".split()
)


def is_stocks_member(tracker: Any, name: str) -> bool:
    """Return whether stock knows this member of a mesh.

    From 2.12 on torch registers them. Up to 2.11 stock folds operators, and everything of a mesh without
    a source, as constants of a mesh that is guarded as a whole, and cannot trace the methods' code.
    """
    if not HAS_OPAQUE_TYPES:
        found = inspect.getattr_static(type(tracker.real), name, None)
        known = name in _MESH_MEMBERS_OF_2_11 or tracker.source is None or inspect.isfunction(found)
        return known and hasattr(tracker.real, name)
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


def guard(tracker: Any, create: Callable[..., None]) -> None:
    """Guard a tracker's object by ``create``: ``VALUE_MATCH`` or ``IDENTITY_MATCH``, bound once by partial."""
    guard_source(tracker.source, create)


def guard_source(source: Any, create: Callable[..., None]) -> None:
    """The same for a source; nothing to do for none, and for what cannot change."""
    if source is not None and not is_constant_source(source):
        install_guard(source.make_guard(create))


def VALUE_MATCH(
    builder: Any,
    guard: Any,
    *,
    what: str,
    read: Callable[[Any], Any],
    method: str | None = None,
    hold: bool = False,
) -> None:
    """Guard: ``read(object)`` is what it was. Reads nothing of torch's tables, so it outlives disable().

    ``method`` is the name of a method without arguments if ``read`` calls just that, which is then
    called and compared in C. With ``hold`` the object is kept, and known by its identity when it comes
    again.
    """
    value = builder.get(guard)
    expected = read(unwrap(value))
    code = _guards.get_verbose_code_parts(f"{what} of {guard.name} == {expected!r}", guard)
    if method is not None and not isinstance(value, FakeScriptObject):
        source = CallFunctionNoArgsSource(AttrSource(guard.originating_source, method))
        manager = builder.get_guard_manager_from_source(source)
        manager.add_equals_match_guard(expected, code, guard.user_stack)
        return

    def check(value: Any) -> bool:
        try:
            return bool(read(unwrap(value)) == expected)
        except Exception:  # e.g. a group that has been destroyed
            return False

    passes = same_or(value, check) if hold else check
    builder.get_guard_manager(guard).add_lambda_guard(passes, code, guard.user_stack)


def IDENTITY_MATCH(builder: Any, guard: Any) -> None:
    """Guard: it is this very object; under an outer trace, this object or its stand-in."""
    value = builder.get(guard)
    if isinstance(value, FakeScriptObject):
        VALUE_MATCH(builder, guard, what="id", read=id)
    else:
        builder.ID_MATCH(guard)


def register_guards() -> list[Change]:
    """Tell Dynamo's subgraph reuse (from 2.13 on) how to evaluate our guards while tracing."""
    table = _optional("torch._dynamo.guards", "GUARD_VALUE_DISPATCH")
    spec = _optional("torch._dynamo.guards", "GuardCheckSpec")
    if table is None or spec is None:
        return []

    def read_value(guard: Any, value: Any) -> tuple[Callable[[Any], Any], Any]:
        read = guard.create_fn.keywords["read"]
        return read, read(unwrap(value))

    return [
        SetItem(
            table,
            "VALUE_MATCH",
            spec(read_value, lambda value, seen: seen[0](unwrap(value)) == seen[1]),
        ),
        SetItem(
            table,
            "IDENTITY_MATCH",
            spec(
                lambda guard, value: id(unwrap(value)),
                lambda value, seen: id(unwrap(value)) == seen,
            ),
        ),
    ]


# --- Groups and meshes: made outside, entered as contexts ------------------------------------------


def is_registered_group(group: Any) -> bool:
    """Return whether a process group is alive: c10d still gives it for its name."""
    try:
        return resolve_process_group(group.group_name) is group
    except (RuntimeError, ValueError, KeyError, LookupError, AttributeError):
        return False


def groups_of_mesh(mesh: Any) -> tuple[Any, ...]:
    """The groups of a mesh's dimensions; none where it was made without, or this rank is no member."""
    try:
        return tuple(mesh.get_all_groups())
    except (RuntimeError, ValueError, KeyError, LookupError, AttributeError):
        return ()


def no_modes() -> Any:
    """Inside, tensors are real, whatever fake or dispatch mode is on. Seen in 2.11 to 2.15."""

    return _disable_current_modes()


def on_group_creation(made: Callable[[Mapping[str, Any], Any], None]) -> list[Change]:
    """Call ``made(arguments, group)`` after each eager ``new_group``, on every rank.

    ``_new_group_with_tag`` was seen in 2.11 to 2.15.
    """
    stock: Any = vars(_c10d)["_new_group_with_tag"]
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        group = stock(*args, **kwargs)
        made(signature.bind(*args, **kwargs).arguments, group)
        return group

    return [SetAttribute(_c10d, "_new_group_with_tag", new_group)]


def keeps_order_of_ranks(mesh: Any) -> bool:
    """Return whether groups of the mesh have their ranks in its order, not sorted; new in 2.15."""
    return getattr(mesh, "_preserve_rank_order", False)


def on_mesh_creation(made: Callable[[Any], None]) -> list[Change]:
    """Call ``made(mesh)`` after each mesh that eager code makes."""
    from torch.distributed.device_mesh import DeviceMesh

    stock = DeviceMesh.__init__

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        made(self)

    return [SetAttribute(DeviceMesh, "__init__", init)]


class MeshContext(GenericContextWrappingVariable):
    """``with mesh:``. Its ``__enter__`` and ``__exit__`` are Python and are traced with the tracker."""

    def __init__(self, tracker: Any) -> None:
        super().__init__(tracker.real)
        self.tracker = tracker

    def enter(self, tx: Any) -> Any:
        return call_traced(tx, type(self.cm_obj).__enter__, [self.tracker], {})

    def exit(self, tx: Any, *args: Any) -> Any:
        result = call_traced(tx, type(self.cm_obj).__exit__, [self.tracker, *args], {})
        tx.active_generic_context_managers.pop()
        return result


def mesh_as_context(tracker: Any) -> list[Change]:
    """``with mesh:`` for meshes tracked by ``tracker``. Seen in 2.11 to 2.15."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase as translator

    stock = translator.setup_or_before_with

    @functools.wraps(stock)
    def setup_or_before_with(self: Any, inst: Any) -> None:
        top = self.stack[-1].realize()
        if isinstance(top, tracker):
            self.pop()
            self.push(MeshContext(top))
        stock(self, inst)

    return [SetAttribute(translator, "setup_or_before_with", setup_or_before_with)]


def derive_by_overload(cls: type) -> list[Change]:
    """Objects of ``cls`` that AOTAutograd derives from a graph's inputs are calls of an operator's overload.

    Stock leaves the operator's name without an overload in the graph, such as ``_get_submesh`` for a
    slice of a mesh, which Inductor refuses. Seen in 2.13 to 2.15.
    """
    info = _opaque.get_opaque_obj_info(cls) if HAS_OPAQUE_TYPES else None
    stock = getattr(info, "reconstruct_fn", None)
    if stock is None:
        return []

    @functools.wraps(stock)
    def derive(*args: Any) -> Any:
        proxy = stock(*args)
        if proxy is not None and isinstance(proxy.node.target, torch._ops.OpOverloadPacket):
            proxy.node.target = proxy.node.target.default
        return proxy

    return [SetAttribute(info, "reconstruct_fn", derive)]


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
