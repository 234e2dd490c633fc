"""The only file that names private torch parts for this package, each behind a feature probe.

A name that a torch lacks is None here; what differs from version to version is made one shape. What
stands here knows how to look into torch and how to change it, not when or why.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, NoReturn, Protocol

import torch
import torch._C._distributed_c10d as _distributed_c10d
import torch._dynamo.config as _dynamo_config
import torch._dynamo.convert_frame as _convert_frame
import torch._dynamo.guards as _guards
import torch._dynamo.variables.builder as _builder
import torch._functorch._aot_autograd.collect_metadata_analysis as _collect_metadata
import torch._functorch._aot_autograd.functional_utils as _functional_utils
import torch._functorch.partitioners as _partitioners
import torch.compiler.config as _compiler_config
import torch.distributed.device_mesh as _device_mesh
import torch.distributed.distributed_c10d as _c10d
import torch.distributed.nn.functional as _nn_functional
import torch.distributed.tensor._dtensor_spec as _dtensor_spec
import torch.distributed.tensor.parallel.loss as _loss
import torch.distributed.tensor.placement_types as _placement_types
import torch.fx.experimental.proxy_tensor as _proxy_tensor
from torch._C import _functionalization, _get_dispatch_mode
from torch._C import _TorchDispatchModeKey as _ModeKey
from torch._dynamo.backends import registry as _backends
from torch._dynamo.bytecode_transformation import (
    create_call_function,
    create_call_method,
    create_instruction,
)
from torch._dynamo.codegen import PyCodegen
from torch._dynamo.exc import raise_observed_exception, unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.output_graph import OutputGraph
from torch._dynamo.source import AttrSource, GlobalWeakRefSource, TypeSource, is_constant_source
from torch._dynamo.utils import proxy_args_kwargs as _proxy_args_kwargs
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.ctx_manager import GenericContextWrappingVariable
from torch._dynamo.variables.functions import UserMethodVariable
from torch._dynamo.variables.misc import LambdaVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.user_defined import UserDefinedClassVariable
from torch._library import opaque_object as _opaque
from torch._library.fake_class_registry import FakeScriptObject
from torch._logging._internal import log_registry as _log_registry
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

log = logging.getLogger(__name__)


def _optional(module: str, *names: str) -> Any:
    """The first of ``names`` that ``module`` has; None if it has none of them."""
    found = importlib.import_module(module)
    return next((getattr(found, name) for name in names if hasattr(found, name)), None)


def probes() -> dict[str, bool]:
    """What this torch has, by the names that ``doctor`` explains."""
    entry = _compiler_config._config["cache_key_tag"]  # type: ignore[attr-defined]
    return {
        "opaque_types": HAS_OPAQUE_TYPES,
        "custom_class_names": _OPAQUE is not None and _OPAQUE.__name__.startswith("CustomClass"),
        "getattro_protocol": HAS_GETATTRO_PROTOCOL,
        "config_per_thread": hasattr(entry.user_override, "get"),
        "subgraph_reuse": hasattr(_guards, "GUARD_VALUE_DISPATCH"),
        "short_log_names": _log_registry.is_log("dist"),
    }


# --- Changes: what enable() does to torch, each with its way back --------------------------------

_MISSING = object()


class Change(Protocol):
    """One thing done to torch. ``undo`` is called once after ``apply`` and restores exactly."""

    def apply(self) -> None: ...

    def undo(self) -> None: ...


class SetAttribute:
    """Replace or add an attribute of a class or a module; descriptors are kept as they are."""

    def __init__(self, owner: Any, name: str, value: object) -> None:
        self.owner, self.name, self.value = owner, name, value

    def apply(self) -> None:
        self.before = vars(self.owner).get(self.name, _MISSING)
        setattr(self.owner, self.name, self.value)

    def undo(self) -> None:
        if self.before is _MISSING:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


class SetItem:
    """Replace or add one item of a table."""

    def __init__(self, table: MutableMapping[Any, Any], key: object, value: object) -> None:
        self.table, self.key, self.value = table, key, value

    def apply(self) -> None:
        self.before = self.table.get(self.key, _MISSING)
        self.table[self.key] = self.value

    def undo(self) -> None:
        if self.before is _MISSING:
            del self.table[self.key]
        else:
            self.table[self.key] = self.before


class CacheKeyTag:
    """Append ``digest`` to ``torch.compiler.config.cache_key_tag``, for every thread.

    The tag is part of the keys of torch's compile caches. From 2.13 on a value set in a thread is
    seen in that thread alone, while backward graphs may be compiled in another one: so it is the
    default that changes, and besides it the value of this thread if it had one. Seen in 2.11 to 2.15.
    """

    def __init__(self, digest: str) -> None:
        self.digest = digest

    def apply(self) -> None:
        entry = _compiler_config._config["cache_key_tag"]  # type: ignore[attr-defined]
        default, from_env, here = entry.default, entry.env_value_default, _override(entry)
        self.before = (default, from_env, here)
        entry.default = default + self.digest
        if isinstance(from_env, str):
            entry.env_value_default = from_env + self.digest
        if isinstance(here, str):
            _compiler_config.cache_key_tag = here + self.digest

    def undo(self) -> None:
        entry = _compiler_config._config["cache_key_tag"]  # type: ignore[attr-defined]
        default, from_env, here = self.before
        entry.default, entry.env_value_default = default, from_env
        now = _override(entry)
        if (
            isinstance(here, str) and now == here + self.digest
        ):  # else the user's own, set meanwhile
            _compiler_config.cache_key_tag = here


def _override(entry: Any) -> object:
    """What this thread set for a config entry, or torch's mark for "nothing"."""
    override = entry.user_override
    return override.get() if hasattr(override, "get") else override


def cache_key_tag() -> str:
    """The tag as torch's caches read it in this thread."""
    return _compiler_config.cache_key_tag


class BackendEntryPoint:
    """Make Dynamo resolve a backend's entry point again at its next naming, once undone.

    Dynamo keeps the function that an entry point gave (``_COMPILER_FNS``) and forgets the entry
    point (``_BACKENDS``). Seen in 2.11 to 2.15.
    """

    def __init__(self, entry_point: EntryPoint) -> None:
        self.entry_point = entry_point

    def apply(self) -> None:
        self.before = _backends._BACKENDS.get(self.entry_point.name, _MISSING)

    def undo(self) -> None:
        name = self.entry_point.name
        _backends._COMPILER_FNS.pop(name, None)
        if isinstance(self.before, EntryPoint):
            _backends._BACKENDS[name] = self.before
        elif name in _backends._BACKENDS:
            _backends._BACKENDS[name] = self.entry_point


# Dynamo holds this lock while it traces: under it no table changes in the middle of a trace, and
# two threads cannot enable and disable at once.
compile_lock = _convert_frame.compile_lock


# --- Trackers: Dynamo's stock ones for our three types, and the protocol they speak ---------------

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
    tracker made from nothing lacks them as soon as its object must become a graph input.
    """
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

    return [SetAttribute(owner, "__init__", init)]


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
    if stock_compare is not None:
        changes.append(SetAttribute(owner, compare, functools.wraps(stock_compare)(richcompare)))
    elif hasattr(owner, "get_real_python_backed_value"):  # 2.12 compares classes by it, or breaks
        changes.append(SetAttribute(owner, "get_real_python_backed_value", lambda self: self.value))
    return changes


def extend_builtins() -> list[Change]:
    """``str``, ``hash`` and ``isinstance`` of our trackers, where stock looks at the stand-in or breaks.

    Stock prints an opaque object's stand-in up to 2.13, has no ``hash`` of one up to 2.12, and from 2.15 on
    asks ``isinstance`` which object it is, which would guard its identity.
    """

    def answer_str(tx: Any, arg: Any) -> Any:
        return arg.text(tx, "__str__")

    def answer_hash(tx: Any, arg: Any) -> Any:
        arg.guard_identity()
        return build(tx, hash(arg.real))

    def answer_isinstance(tx: Any, arg: Any, classes: Any) -> Any:
        values = constants([classes], {})
        return None if values is None else build(tx, isinstance(arg.real, values[0][0]))

    return [
        SetAttribute(BuiltinVariable, name, _answered(getattr(BuiltinVariable, name, None), answer))
        for name, answer in (
            ("call_str", answer_str),
            ("call_hash", answer_hash),
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

    return [SetItem(table, id(function), wrap)]


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
    """Where ``tracker.name`` comes from; None if that of ``tracker`` is not known."""
    return AttrSource(tracker.source, name) if tracker.source is not None else None


def imported_source(tx: Any, module: str, *path: str) -> Any:
    """The source of ``module.path[0].path[1]...``."""
    source = tx.import_source(module)
    for name in path:
        source = AttrSource(source, name)
    return source


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


def is_literal(value: object) -> bool:
    """Whether stock's ``ConstantVariable`` may hold this value."""
    return bool(ConstantVariable.is_literal(value))


_MESH_MEMBERS_OF_2_11 = frozenset(
    "ndim device_type mesh_dim_names size get_coordinate get_rank get_local_rank get_group _flatten "
    "_is_current_rank_part_of_mesh _get_or_create_default_group _sym_get_coordinate".split()
)


def is_stocks_member(tracker: Any, name: str) -> bool:
    """Whether stock knows this member of a mesh.

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
    """Whether torch registered this member as Python code to be traced, not as a constant."""
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


def VALUE_MATCH(builder: Any, guard: Any, *, what: str, read: Callable[[Any], Any]) -> None:
    """Guard: ``read(object)`` is what it was. Reads nothing of torch's tables, so it outlives disable()."""
    expected = read(unwrap(builder.get(guard)))

    def check(value: Any) -> bool:
        try:
            return bool(read(unwrap(value)) == expected)
        except Exception:  # e.g. a group that has been destroyed
            return False

    code = _guards.get_verbose_code_parts(f"{what} of {guard.name} == {expected!r}", guard)
    builder.get_guard_manager(guard).add_lambda_guard(check, code, guard.user_stack)


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
    """Whether a process group is alive: c10d still gives it for its name."""
    try:
        return resolve_process_group(group.group_name) is group
    except (RuntimeError, ValueError, KeyError, LookupError, AttributeError):
        return False


def no_modes() -> Any:
    """Inside, tensors are real, whatever fake or dispatch mode is on. Seen in 2.11 to 2.15."""
    from torch.utils._python_dispatch import _disable_current_modes

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
        function = UserMethodVariable(type(self.cm_obj).__enter__, self.tracker)
        return function.call_function(tx, [], {})

    def exit(self, tx: Any, *args: Any) -> Any:
        function = UserMethodVariable(type(self.cm_obj).__exit__, self.tracker)
        result = function.call_function(tx, list(args), {})
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


# --- Lowering: c10d calls that are traced as functions of ours, and work in flight ----------------

register_work: Callable[[torch.Tensor, Any], None] = vars(_distributed_c10d)["_register_work"]
premul_sum: Callable[[float], Any] = vars(_distributed_c10d)["_make_nccl_premul_sum"]


def c10d_function(name: str) -> Any:
    """A function of ``torch.distributed.distributed_c10d``, private ones too; None if it has none."""
    return getattr(_c10d, name, None)


nn_functional_module: Any = _nn_functional


def nn_function(name: str) -> Any:
    """An autograd function of ``torch.distributed.nn.functional``."""
    return getattr(_nn_functional, f"_{name}")


def collective_options(kind: str) -> Any:
    """New options of a backend's collective: ``kind`` is "Allreduce", "Barrier" and so on."""
    return getattr(_distributed_c10d, f"{kind}Options")()


def reduce_scatter_of(group: Any) -> Any:
    """The group's reduce-scatter of one tensor into one; renamed in 2.13."""
    name = "reduce_scatter_single"
    return getattr(group, name) if hasattr(group, name) else group._reduce_scatter_base


class ObjectTracker(VariableTracker):
    """An object that exists while tracing only; its members and its way out are the subclass's hooks."""

    def attribute(self, tx: Any, name: str) -> Any:
        """Hook: the tracker of an attribute, bound methods included."""
        raise NotImplementedError

    def method(self, tx: Any, name: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Hook: the result of a method call."""
        raise NotImplementedError

    def traced_type(self) -> type:
        """Hook: what ``type()`` gives."""
        raise NotImplementedError

    def python_type(self) -> type:
        return self.traced_type()

    def var_getattr(self, tx: Any, name: str) -> Any:
        return self.attribute(tx, name)

    def tp_getattro_impl(self, tx: Any, name: str) -> Any:
        return self.attribute(tx, name)

    def call_method(self, tx: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.method(tx, name, list(args), kwargs)

    def call_obj_hasattr(self, tx: Any, name: str) -> Any:
        return ConstantVariable.create(hasattr(self.traced_type(), name))

    def is_python_hashable(self) -> bool:
        return True

    def get_python_hash(self) -> int:
        return id(self)

    def is_python_equal(self, other: object) -> bool:
        return self is other


def construct(codegen: Any, cls: type, args: list[Any]) -> None:
    """Make ``cls(*args)`` when the compiled function returns; a function in ``args`` is imported."""
    codegen.add_push_null(lambda: codegen.load_import_from(cls.__module__, cls.__name__))
    for arg in args:
        if inspect.isfunction(arg):
            codegen.load_import_from(arg.__module__, arg.__name__)
        else:
            codegen(arg)
    codegen.extend_output(create_call_function(len(args), False))


def call_before_graph(tx: Any, source: Any, method: str) -> None:
    """Have ``source.method()`` called each time the compiled function starts, before its graph."""
    codegen = PyCodegen(tx.output.root_tx)
    codegen(source)
    codegen.load_method(method)
    codegen.extend_output(create_call_method(0))
    codegen.append_output(create_instruction("POP_TOP"))
    tx.output.pregraph_bytecode.extend(codegen.get_instructions())


def trace_state(tx: Any, make: Callable[[], Any]) -> Any:
    """What we keep for one trace; made anew when Dynamo starts over."""
    state = vars(tx.output).get("_dynamo_dist")
    if state is None:
        state = tx.output._dynamo_dist = make()
    return state


def realized(tracker: Any) -> Any:
    """The tracker itself; a lazy one installs its guards."""
    return tracker.realize() if hasattr(tracker, "realize") else tracker


def python_object(tracker: Any) -> Any:
    """The object that a tracker stands for, without a guard; raises NotImplementedError for none."""
    tracker = realized(tracker)
    value = getattr(tracker, "value", _MISSING)
    return tracker.as_python_constant() if value is _MISSING else unwrap(value)


def items_of(tx: Any, tracker: Any) -> list[Any]:
    """The trackers in a traced list or tuple."""
    return [realized(item) for item in realized(tracker).unpack_var_sequence(tx)]


def call_traced(tx: Any, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Trace a plain Python function of ours as if the program had called it here."""
    return build(tx, function).call_function(tx, args, kwargs)


def is_subclass_instance(tracker: Any) -> bool:
    """Whether it tracks a tensor of a class that may answer c10d calls itself, such as DTensor."""
    tracker = realized(tracker)
    if not isinstance(tracker, TensorVariable):
        return False
    return tracker.python_type() not in (torch.Tensor, torch.nn.Parameter)


def user_line(tx: Any, ours: str) -> str:
    """``file:line in function`` of the innermost traced frame outside the folder ``ours``."""
    frame = tx
    while frame is not None:
        if not frame.f_code.co_filename.startswith(ours) or frame.parent is None:
            break
        frame = frame.parent
    return f"{frame.f_code.co_filename}:{frame.lineno} in {frame.f_code.co_name}"


def trackers_in_use(tx: Any) -> set[int]:
    """Ids of the trackers that the code after this point, or the caller, can still reach."""
    found: set[int] = set()
    cache: dict[int, Any] = {}
    effects, frame = tx.output.side_effects, tx
    roots: list[Any] = []
    while frame is not None:
        frame.prune_dead_locals()
        roots += [frame.stack, dict(frame.symbolic_locals)]
        frame = frame.parent
    effects.prune_dead_object_new(tx)
    roots += [dict(effects.id_to_variable), list(effects.store_attr_mutations)]
    roots += [dict(values) for values in effects.store_attr_mutations.values()]
    for root in roots:
        VariableTracker.visit(lambda each: found.add(id(each)), root, cache)
    return found


def on_graph_end(before: Callable[[Any], None], after: Callable[[Any], None]) -> list[Change]:
    """Call ``before(tx)`` and ``after(tx)`` around the end of a graph, at a return or a graph break."""
    stock = OutputGraph.compile_subgraph

    @functools.wraps(stock)
    def compile_subgraph(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        if "_dynamo_dist" not in vars(self):
            return stock(self, tx, *args, **kwargs)
        before(tx)
        result = stock(self, tx, *args, **kwargs)
        after(tx)
        return result

    return [SetAttribute(OutputGraph, "compile_subgraph", compile_subgraph)]


def on_instances(cls: type, make: Callable[[Any, Any, Any], Any]) -> list[Change]:
    """Track every instance of ``cls`` that comes from outside by ``make(tx, value, source)``."""
    stock = VariableBuilder._wrap

    @functools.wraps(stock)
    def wrap(self: Any, value: Any) -> Any:
        if isinstance(value, cls):
            return make(self.tx, value, self.source)
        return stock(self, value)

    return [SetAttribute(VariableBuilder, "_wrap", wrap)]


def on_object(value: object, make: Callable[[Any, Any], Any]) -> list[Change]:
    """Track one object by ``make(tx, source)``."""
    return [
        SetItem(
            VariableBuilder._id_dispatch(),
            id(value),
            lambda builder, _: make(builder.tx, builder.source),
        )
    ]


def allow_point_to_point() -> list[Change]:
    """Let stock construct ``P2POp`` while tracing; before 2.12 it has no switch for that."""
    if "enable_p2p_compilation" not in _dynamo_config._config:  # type: ignore[attr-defined]
        return []
    return [ConfigDefault(_dynamo_config, "enable_p2p_compilation", True)]


class ConfigDefault:
    """Another default for an entry of a torch config module, for every thread."""

    def __init__(self, config: Any, name: str, value: object) -> None:
        self.entry, self.name, self.value = config._config[name], name, value

    def apply(self) -> None:
        self.before = self.entry.default
        self.entry.default = self.value

    def undo(self) -> None:
        self.entry.default = self.before


def value_guard(what: str, read: Callable[[Any], Any]) -> Callable[..., None]:
    """``VALUE_MATCH`` of ``read(object)``, for ``guard`` and ``guard_source``."""
    return functools.partial(VALUE_MATCH, what=what, read=read)


def keep_in_its_pass(namespace: str) -> list[Change]:
    """Keep ops of ours in the pass, forward or backward, that launched them, and launch them once.

    The partitioner copies into the backward whatever it can compute there, and then drops what is
    dead by a rule that knows of torch's own collectives only. Seen in 2.13; where the predicates are
    missing nothing is changed.
    """
    changes: list[Change] = []
    if not hasattr(_partitioners, "_has_tag_is_forward"):
        return changes
    for name, backward in (("_must_be_in_forward", False), ("_must_be_in_backward", True)):
        if (stock := getattr(_partitioners, name, None)) is not None:
            kept = functools.partial(_kept, stock, namespace, backward)
            changes.append(SetAttribute(_partitioners, name, kept))
    return changes


def _kept(stock: Callable[[Any], bool], namespace: str, backward: bool, node: Any) -> bool:
    if getattr(node.target, "namespace", None) != namespace:
        return stock(node)
    # What an autograd function traced in its backward may bear no tag; all of the forward does.
    tag = node.meta.get("partitioner_tag")
    return (tag not in ("is_forward", "must_be_in_forward")) == backward


# Calls on a tensor that tell of its sizes, or make one like it, without reading it.
_METADATA = frozenset(
    "size stride dim numel storage_offset is_contiguous new_empty new_zeros new_ones new_full "
    "empty_like zeros_like ones_like full_like rand_like randn_like".split()
)


def fake_tensors(tx: Any, tracker: Any) -> list[torch.Tensor]:
    """The stand-ins of the tensors in a traced list: their sizes, strides and shared storages."""
    return [fake_tensor(item) for item in items_of(tx, tracker)]


def fake_tensor(tracker: Any) -> torch.Tensor:
    """The stand-in of one tensor."""
    return realized(tracker).as_proxy().node.meta["example_value"]


def on_tensor_uses(watched: Callable[[Any], list[Any]], used: Callable[..., None]) -> list[Change]:
    """Call ``used(tx, owner)`` where a traced operation reads or writes a watched tensor.

    ``watched(tx)`` gives pairs of a tensor's stand-in and an owner; taking a view is no use. Every
    traced operation passes through ``get_fake_value``, with the stand-ins of its arguments.
    """
    stock: Any = vars(_builder)["get_fake_value"]

    @functools.wraps(stock)
    def get_fake_value(node: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        state = vars(tx.output).get("_dynamo_dist")
        pairs = watched(state) if state is not None else []
        if not pairs:
            return stock(node, tx, *args, **kwargs)
        inputs = [
            arg.meta["example_value"]
            for arg in node.all_input_nodes
            if isinstance(arg.meta.get("example_value"), torch.Tensor)
        ]
        hits = [
            (tensor, tensor._version, owner)
            for tensor in inputs
            for buffer, owner in pairs
            if may_overlap(tensor, buffer)
        ]
        value = stock(node, tx, *args, **kwargs)
        for tensor, version, owner in hits:
            if not _reads_no_data(node, value, tensor) or tensor._version != version:
                used(tx, owner)
        return value

    return [SetAttribute(_builder, "get_fake_value", get_fake_value)]


def _reads_no_data(node: Any, value: Any, of: torch.Tensor) -> bool:
    if getattr(node.target, "__name__", node.target) in _METADATA:
        return True
    results = value if isinstance(value, (list, tuple)) else [value]
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    return bool(tensors) and all(_same_storage(tensor, of) for tensor in tensors)


def _same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or StorageWeakRef(a.untyped_storage()) == StorageWeakRef(b.untyped_storage())


def may_overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two stand-ins share memory; True where symbolic sizes or strides leave it open."""
    try:
        if not _same_storage(a, b):
            return False
    except NotImplementedError:  # no storage: a subclass's wrapper
        return a is b
    if a.dtype != b.dtype and a.element_size() != b.element_size():
        return True
    return _ranges_meet(_extent(a), _extent(b)) and not _apart_in_a_dimension(a, b)


def _extent(tensor: torch.Tensor) -> tuple[int, int] | None:
    """First and last element within the storage; None if not known while tracing."""
    if not all(
        isinstance(n, int) for n in (tensor.storage_offset(), *tensor.shape, *tensor.stride())
    ):
        return None
    if tensor.numel() == 0:
        return (0, -1)
    first: Any = tensor.storage_offset()
    last = first + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return first, last


def _ranges_meet(a: tuple[int, int] | None, b: tuple[int, int] | None) -> bool:
    if a is None or b is None:
        return True
    return a[0] <= a[1] and b[0] <= b[1] and a[0] <= b[1] and b[0] <= a[1]


def _apart_in_a_dimension(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether equal strides show two slices of one tensor to be disjoint, such as column blocks."""
    if a.stride() != b.stride() or _extent(a) is None or _extent(b) is None:
        return False
    at, bt = a.storage_offset(), b.storage_offset()
    for step, n, m in sorted(zip(a.stride(), a.shape, b.shape, strict=True), reverse=True):
        if step <= 0:
            return False
        start, other = at // step, bt // step
        if start + n <= other or other + m <= start:
            return True
        at, bt = at % step, bt % step
    return False


# --- DTensor: views of inputs as outputs ----------------------------------------------------------


def storage_key(tensor: torch.Tensor) -> Any:
    """Equal for tensors that share memory, under functionalization too."""
    return StorageWeakRef(tensor.untyped_storage())


def has_tensors(tree: Any) -> bool:
    """Whether any leaf is a tensor."""
    return any(isinstance(leaf, torch.Tensor) for leaf in _pytree.tree_leaves(tree))


tree_map = _pytree.tree_map


def overload(name: str, overload: str) -> Any:
    """The operator of a schema's name, such as ``aten::view``."""
    namespace, _, op = name.partition("::")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")


class _CallRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def recorded_views(view: torch.Tensor, base: torch.Tensor) -> tuple[Any, list[Any]]:
    """Replay what autograd recorded from ``base`` to ``view``: the result, and the operators' calls."""
    with torch.no_grad(), _CallRecorder() as recorder:
        found = view._view_func_unsafe(base)
    return found, recorder.calls


def local_views(local: torch.Tensor) -> Any:
    """The views by which functionalization reached this tensor, or None; they can be pickled."""
    if not isinstance(local, FunctionalTensor):
        return None
    views = _functionalization.get_view_meta_sequence(local.elem)
    return None if any(view.has_symbolic_inputs for view in views) else views


def apply_local_views(base: torch.Tensor, views: Any) -> torch.Tensor:
    """The same views of another tensor."""
    return _functionalization.apply_view_meta_sequence(base, views)


def on_output_aliases(
    record: Callable[..., Any], replay: Callable[..., Any], cls: type
) -> list[Change]:
    """Let ``record(args, outputs)`` say how outputs of ``cls`` come from their bases, and ``replay`` do it.

    AOTAutograd runs the program once to see what aliases what; ``record`` gives the outputs to look at
    and for each a way or None. The way stands in ``OutputAliasInfo.view_meta_sequence``, where
    AOTAutograd keeps those of plain tensors, and is given to ``replay(way, base, target,
    requires_grad)`` after each call. Seen in torch 2.11 to 2.15.
    """
    stock_collect = _collect_metadata.run_functionalized_fw_and_collect_metadata
    stock_alias = _functional_utils.gen_alias_from_base

    @functools.wraps(stock_collect)
    def collect(f: Any, *args: Any, **kwargs: Any) -> Any:
        ways: list[Any] = []

        @functools.wraps(f)
        def watched(*flat: Any) -> Any:
            if not any(isinstance(arg, cls) for arg in flat):
                return f(*flat)
            with torch.autograd.grad_mode._force_original_view_tracking(True):
                outputs = f(*flat)
            found, ways[:] = record(flat, outputs)
            return type(outputs)(found)

        inner = stock_collect(watched, *args, **kwargs)

        @functools.wraps(inner)
        def run(*flat: Any) -> Any:
            metadata = inner(*flat)
            for i, way in enumerate(ways):
                info = metadata.output_info[i]
                if way is not None and "alias" in info.output_type.name:
                    metadata.output_info[i] = dataclasses.replace(info, view_meta_sequence=way)
            return metadata

        return run

    @functools.wraps(stock_alias)
    def alias(
        base: Any, target: Any, requires_grad: bool, way: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(base, cls) and (way is not None or not _same_layout(base, target)):
            return replay(way, base, target, requires_grad)
        return stock_alias(base, target, requires_grad, way, *args, **kwargs)

    places = [
        _collect_metadata,
        _functional_utils,
        _optional_module("torch._functorch.aot_autograd"),
        _optional_module("torch._functorch._aot_autograd.runtime_wrappers"),
        _optional_module("torch._functorch._aot_autograd.graph_capture_wrappers"),
        _optional_module("torch._functorch._aot_autograd.standalone_runtime"),  # 2.15
    ]
    return [
        SetAttribute(place, name, value)
        for place in places
        for name, value in (
            ("run_functionalized_fw_and_collect_metadata", collect),
            ("gen_alias_from_base", alias),
        )
        if name in vars(place or object)
    ]


def _same_layout(a: Any, b: Any) -> bool:
    return a.shape == b.shape and a.stride() == b.stride()


def _optional_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


# --- DTensor: attributes and construction ----------------------------------------------------------

DTensorSpec: Any = _dtensor_spec.DTensorSpec
TensorMeta: Any = _dtensor_spec.TensorMeta


def current_mesh() -> Any:
    """Traced: the mesh of the innermost ``with mesh:``; RuntimeError outside of any."""
    return _device_mesh._mesh_resources.get_current_mesh()


_ATTRIBUTE_METHODS = ("var_getattr", "tp_getattro_impl")  # the second from 2.14 on


def on_tensor_attributes(
    has_attribute: Callable[[Any, type, str], bool | None],
    attribute: Callable[[Any, Any, str], Any],
) -> list[Change]:
    """``hasattr(tensor, name)`` and ``tensor.name``, where our answer is not None.

    ``has_attribute(tracker, cls, name)`` is given the tensor's class, and ``attribute(tx, tracker, name)``
    gives a tracker.
    """
    stock_hasattr: Any = TensorVariable.call_obj_hasattr
    name = next(name for name in reversed(_ATTRIBUTE_METHODS) if name in vars(TensorVariable))
    stock_getattr = getattr(TensorVariable, name)

    @functools.wraps(stock_hasattr)
    def call_obj_hasattr(self: Any, tx: Any, name: str) -> Any:
        found = has_attribute(self, type(fake_tensor(self)), name)
        return stock_hasattr(self, tx, name) if found is None else ConstantVariable.create(found)

    @functools.wraps(stock_getattr)
    def getattr_(self: Any, tx: Any, name: str) -> Any:
        found = attribute(tx, self, name)
        return stock_getattr(self, tx, name) if found is None else found

    return [
        SetAttribute(TensorVariable, "call_obj_hasattr", call_obj_hasattr),
        SetAttribute(TensorVariable, name, getattr_),
    ]


def on_construction(answers: Mapping[type, Callable[..., Any]]) -> list[Change]:
    """``cls(...)`` while tracing, where ``answers[cls](tx, args, kwargs)`` is not None.

    One call for all classes: a second would take the place of the first.
    """
    stock: Any = UserDefinedClassVariable.call_function

    @functools.wraps(stock)
    def call_function(self: Any, tx: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        answer = next((answers[cls] for cls in answers if cls is self.value), None)
        found = None if answer is None else answer(tx, list(args), kwargs)
        return stock(self, tx, args, kwargs) if found is None else found

    return [SetAttribute(UserDefinedClassVariable, "call_function", call_function)]


# --- DTensor: loss_parallel -----------------------------------------------------------------------

enable_loss_ops: Callable[[], None] = vars(_loss)["_enable_custom_loss_ops"]
disable_loss_ops: Callable[[], None] = vars(_loss)["_disable_custom_loss_ops"]


def dtensor_op_handlers() -> dict[Any, Any]:
    """Operators that DTensor's dispatcher hands to a function of its own."""
    return DTensor._op_dispatcher._custom_op_handlers


def dtensor_state(tx: Any) -> dict[str, Any]:
    """What the tracing of DTensor's contexts keeps for one graph; new when Dynamo starts over."""
    found: dict[str, Any] = vars(tx.output).setdefault("_dynamo_dist_dtensor", {})
    return found


def is_tensor_of(tracker: Any, cls: type) -> bool:
    """Whether it tracks a tensor of this class."""
    tracker = realized(tracker)
    return isinstance(tracker, TensorVariable) and isinstance(fake_tensor(tracker), cls)


def requires_grad(tracker: Any) -> bool:
    """Whether the tracked tensor requires gradients."""
    return bool(fake_tensor(tracker).requires_grad)


def call_in_graph(tx: Any, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """One node of the graph that calls a Python function of ours; AOTAutograd looks into it."""
    proxy_args, proxy_kwargs = _proxy_args_kwargs(
        [realized(arg) for arg in args], {name: realized(arg) for name, arg in kwargs.items()}
    )
    proxy = tx.output.create_proxy("call_function", function, proxy_args, proxy_kwargs)
    return _builder.wrap_fx_proxy(tx=tx, proxy=proxy)


# --- DTensor: dynamic sizes -----------------------------------------------------------------------


def keep_first_symbols() -> list[Change]:
    """While AOTAutograd makes a graph, a size that is known as an input stays known as that input.

    Stock lets any later value that simplifies to the same symbol take its place, such as the
    ``sym_max(s0, 1)`` by which DTensor computes strides, whose own argument is then looked up as itself,
    without end. Seen in torch 2.12 to 2.15.
    """
    stock = _proxy_tensor.set_proxy_slot

    @functools.wraps(stock)
    def set_proxy_slot(obj: Any, tracer: Any, proxy: Any) -> None:
        known = expression = None
        if isinstance(obj, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            expression = obj.node.expr
            known = tracer.sympy_expr_tracker.get(expression)
        stock(obj, tracer, proxy)
        if known is not None:
            tracer.sympy_expr_tracker[expression] = known

    return [SetAttribute(_proxy_tensor, "set_proxy_slot", set_proxy_slot)]


# --- DTensor: strided shards ----------------------------------------------------------------------


def keep_strided_shards() -> list[Change]:
    """A DTensor that a view left in strided shards goes through AOTAutograd's flattening and back.

    Such a view says by a flag that the order of its shards stands beside its placements; the flattened
    form lacks the flag, and an order that is there shows it was set. Seen in torch 2.11 to 2.15.
    """
    stock = DTensor.__tensor_unflatten__

    @functools.wraps(stock)
    def unflatten(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        placements, meta, *rest = context
        if len(rest) != 2 or rest[0] is None or not any(map(_is_strided_shard, placements)):
            return stock(inner, context, size, stride)
        spec = DTensorSpec(
            inner["device_mesh"],
            placements,
            tensor_meta=TensorMeta(size, stride, meta.dtype),
            shard_order=rest[0],
            use_strided_shard_as_shard_order=False,
        )
        return DTensor(inner["_local_tensor"], spec, requires_grad=rest[1])

    return [SetAttribute(DTensor, "__tensor_unflatten__", staticmethod(unflatten))]


def _is_strided_shard(placement: Any) -> bool:
    return isinstance(placement, _placement_types._StridedShard)


def count_strided_shards_with_real_tensors() -> list[Change]:
    """How large a strided shard is is computed with tensors; while tracing they must not be fakes.

    Otherwise each index becomes an unknown size of the program's graph. Seen in torch 2.11 to 2.15.
    """
    cls, name = _placement_types._StridedShard, "local_shard_size_and_offset"
    stock = vars(cls).get(name)
    if not inspect.isfunction(stock):
        return []

    @functools.wraps(stock)
    def size_and_offset(*args: Any, **kwargs: Any) -> Any:
        fake = _get_dispatch_mode(_ModeKey.FAKE) is not None
        if not fake or any(isinstance(arg, torch.SymInt) for arg in (*args, *kwargs.values())):
            return stock(*args, **kwargs)
        with _disable_current_modes():
            return stock(*args, **kwargs)

    return [SetAttribute(cls, name, size_and_offset)]


# --- Graph breaks, recompiles and failed compiles, for dynamo_dist.reporting ---------------------


@dataclass(frozen=True, slots=True)
class SeenBreak:
    """One graph break, as Dynamo logs it. ``stack`` is what was being traced, innermost last."""

    kind: str
    message: str
    stack: tuple[traceback.FrameSummary, ...]
    falls_back: bool  # the whole function, or the rest of it, runs eagerly


@dataclass(frozen=True, slots=True)
class SeenCompile:
    """One attempt to compile a frame, done or failed; ``reported`` if a SeenBreak told of the failure."""

    function: str
    file: str
    line: int
    recompile_reason: str
    failure: str
    message: str
    stack: tuple[traceback.FrameSummary, ...]
    reported: bool
    suppressed: bool


BreakListener = Callable[[SeenBreak], None]
CompileListener = Callable[[SeenCompile], None]

_FALLBACK_PREFIXES = (
    "Failed to handle graph break gracefully",
    "Encountered graph break that we cannot resume from",
)
_watch_lock = threading.RLock()
_watchers: list[tuple[BreakListener, CompileListener]] = []
_unwatch: list[Callable[[], None]] = []


@contextlib.contextmanager
def watch_dynamo(on_break: BreakListener, on_compile: CompileListener) -> Iterator[None]:
    """Tell of every graph break and every compile, whatever TORCH_LOGS says; nothing else changes.

    Wraps two functions while at least one watcher is on: ``InstructionTranslatorBase.log_graph_break``,
    which Dynamo calls once for each break it recovers from, and the hook ``log_compilation_event``,
    which it calls at the end of each compile (unless ``config.log_compilation_metrics`` is off). Both
    run at compile time only. Seen in torch 2.11 to 2.15; where one is missing, its events are too.
    """
    watcher = (on_break, on_compile)
    with _watch_lock:
        _watchers.append(watcher)
        if len(_watchers) == 1:
            _unwatch.extend(_wrap_dynamo())
    try:
        yield
    finally:
        with _watch_lock:
            _watchers.remove(watcher)
            if not _watchers:
                while _unwatch:
                    _unwatch.pop()()


def _wrap_dynamo() -> Iterator[Callable[[], None]]:
    import torch._dynamo.symbolic_convert as symbolic_convert
    import torch._dynamo.utils as utils

    translator = getattr(symbolic_convert, "InstructionTranslatorBase", None)
    log_break = getattr(translator, "log_graph_break", None)
    if translator is not None and log_break is not None:

        @functools.wraps(log_break)
        def log_graph_break(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = dict(zip(("code_options", "reason", "exc"), args, strict=False)) | kwargs
            exc = bound.get("exc")
            fresh = not getattr(exc, "logged", False)
            result = log_break(self, *args, **kwargs)
            if fresh and isinstance(exc, BaseException):
                _notify(0, lambda: _seen_break(exc, str(bound.get("reason", ""))))
            return result

        yield _replace(translator, "log_graph_break", log_graph_break)

    log_event = getattr(utils, "log_compilation_event", None)
    if log_event is not None:

        @functools.wraps(log_event)
        def log_compilation_event(metrics: Any) -> Any:
            result = log_event(metrics)
            exc = sys.exc_info()[1]
            _notify(1, lambda: _seen_compile(metrics, exc))
            return result

        yield _replace(utils, "log_compilation_event", log_compilation_event)


def _replace(owner: Any, name: str, wrapper: Any) -> Callable[[], None]:
    original = owner.__dict__[name]
    setattr(owner, name, wrapper)

    def restore() -> None:
        # Somebody else may have wrapped ours: then theirs stays, and ours calls nobody.
        if owner.__dict__.get(name) is wrapper:
            setattr(owner, name, original)

    return restore


def _notify(which: int, make: Callable[[], Any]) -> None:
    with _watch_lock:
        listeners = [watcher[which] for watcher in _watchers]
    if not listeners:
        return
    try:
        event = make()
        for listener in listeners:
            listener(event)
    except Exception:
        log.exception("A watcher of graph breaks raised; the compile goes on.")


def _seen_break(exc: BaseException, reason: str) -> SeenBreak:
    error_type = getattr(getattr(exc, "error_type", None), "name", "")
    kind = getattr(exc, "gb_type", None) or f"{type(exc).__name__}: {error_type}".rstrip(": ")
    return SeenBreak(
        kind=kind,
        message=str(getattr(exc, "msg", None) or exc),
        stack=_traced_stack(exc),
        falls_back=reason.startswith(_FALLBACK_PREFIXES),
    )


def _seen_compile(metrics: Any, exc: BaseException | None) -> SeenCompile:
    failure = str(getattr(metrics, "fail_type", None) or "")
    return SeenCompile(
        function=str(getattr(metrics, "co_name", None) or ""),
        file=str(getattr(metrics, "co_filename", None) or ""),
        line=int(getattr(metrics, "co_firstlineno", None) or 0),
        recompile_reason=str(getattr(metrics, "recompile_reason", None) or ""),
        failure=failure,
        message=str(getattr(metrics, "fail_reason", None) or ""),
        stack=_traced_stack(exc) if failure and exc is not None else (),
        reported=bool(getattr(exc, "logged", False)),
        suppressed=bool(getattr(metrics, "config_suppress_errors", None)),
    )


def _traced_stack(exc: BaseException) -> tuple[traceback.FrameSummary, ...]:
    """The user's frames that were being traced: Dynamo's record, else its translators in the traceback."""
    recorded = getattr(exc, "real_stack", None)
    if recorded:
        return tuple(recorded)
    frames: dict[int, traceback.FrameSummary] = {}
    for frame, _ in traceback.walk_tb(exc.__traceback__):
        translator: Any = frame.f_locals.get("self")
        if hasattr(translator, "frame_summary") and hasattr(translator, "f_code"):
            frames[id(translator)] = translator.frame_summary()
    return tuple(frames.values())


# --- Counting and meeting, for dynamo_dist.comparing ----------------------------------------------


def unique_graphs() -> int:
    """Graphs that Dynamo has captured in this process so far. Seen in torch 2.11 to 2.15."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


def default_store() -> Any:
    """The store of the default process group, which must be initialised. Seen in 2.11 to 2.15."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
