"""What a value is, in words that another process can compare: by content, and never by identity.

Two values with equal contents do the same for a program that is traced. Where that cannot be told of a value, ``NotByContent``
names it.
"""

from __future__ import annotations

import contextvars
import enum
import functools
import hashlib
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from dynamo_dist.torch_compat.dtensor import types as dtensor_types
from dynamo_dist.torch_compat.dynamo import frame_values, opaque
from inductor_passes.torch_compat import meshes

Content = Any  # tuples of strings, numbers and tuples
_PLAIN = (bool, int, str, bytes, complex, type(None), type(Ellipsis))
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_DIGITS = 16
_BY_CLASS = {"__dict__", "__weakref__", "__doc__", "__annotations__", "__module__"}


class NotByContent(Exception):
    """A value has no content that another process could check."""


class Contents:
    """Contents of values at one moment: of a class, a mesh and a group once each."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[object, Content]] = {}  # the object, so that its id stays its

    def of(self, value: object) -> Content:
        """Content of a constant, a container of constants, a mesh, a group, a placement or spec, or what ``identity`` takes."""
        kind = type(value)
        if kind in _PLAIN:
            return (kind.__name__, value)
        if kind is float:
            return ("float", repr(value))
        if kind in (list, tuple, torch.Size):
            return (kind.__name__, *map(self.of, value))  # type: ignore[call-overload]
        if kind in (set, frozenset):
            return (kind.__name__, *sorted(map(self.of, value), key=repr))  # type: ignore[call-overload]
        if kind is dict:
            return ("dict", *((self.of(key), self.of(item)) for key, item in value.items()))  # type: ignore[attr-defined]
        if kind in (slice, range):
            return (kind.__name__, *map(self.of, (value.start, value.stop, value.step)))  # type: ignore[attr-defined]
        if isinstance(value, _NAMED):
            return (kind.__name__, str(value))
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return ("named", kind.__module__, kind.__qualname__, *map(self.of, value))
        if isinstance(value, types.CodeType):
            return ("code", code_digest(value))
        return self._of_object(value)

    def identity(self, value: object) -> Content:
        """Content of what a program knows by its name: a module, a class, a function, a constant or variable that there is once."""
        if isinstance(value, (*_PLAIN, *_NAMED)):
            return self.of(value)
        if isinstance(value, types.ModuleType):
            return ("module", value.__name__)
        if isinstance(value, type):
            return self.kind(value)
        if isinstance(value, types.FunctionType):
            return self.function(value, strictly=True)
        if isinstance(value, types.MethodType):
            return ("method", self.identity(value.__func__), self.identity(value.__self__))
        if isinstance(value, _C_FUNCTIONS):
            return self._c_function(value)
        if isinstance(value, enum.Enum):
            return ("enum", self.kind(type(value)), value.name)
        if isinstance(value, contextvars.ContextVar):
            return ("context variable", value.name, self._held(value))
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return ("operator", str(value))
        raise NotByContent(f"an object of {type(value).__module__}.{type(value).__qualname__}")

    def kind(self, cls: type) -> Content:
        """Content of a class: its name, and the code of its methods and of its bases'."""
        return self._once(cls, self._class)

    def function(self, function: types.FunctionType, strictly: bool = False) -> Content:
        """Content of a function: code, defaults, closure. ``strictly``: raise NotByContent where one of these has none."""
        held = (function.__defaults__, function.__kwdefaults__)
        marks = sorted(
            (name, each)
            for name, each in vars(function).items()
            if name not in frame_values.ADDRESSES
        )
        return (
            "function",
            function.__module__,
            code_digest(function.__code__),
            *((name, self._part(each, strictly=False)) for name, each in marks),
            *(self._part(each, strictly) for each in held),
            *(self._cell(cell, strictly) for cell in function.__closure__ or ()),
        )

    def tensor(self, tensor: torch.Tensor) -> Content:
        """What guards on a tensor ask of it, its sizes and strides as they are."""
        marks = {name: value for name, value in vars(tensor).items() if name.startswith("_dynamo_")}
        marks.pop("_dynamo_static_input_type", None)  # which tracing sets
        return (
            self.kind(type(tensor)),
            *(str(each) for each in (tensor.dtype, tensor.device, tensor.layout)),
            tensor.requires_grad,
            self.of(tensor.shape),
            self.of(tensor.stride()) if tensor.layout is torch.strided else (),
            str(torch._C._dispatch_keys(tensor)),
            *((name, self.of(marks[name])) for name in sorted(marks)),
        )

    def _of_object(self, value: Any) -> Content:
        value = opaque.unwrap(value)
        if isinstance(value, DeviceMesh):
            return self._once(value, self._mesh)
        if isinstance(value, dist.ProcessGroup):
            return self._once(value, _group)
        if isinstance(value, Placement) and type(value).__module__ == Shard.__module__:
            return ("placement", type(value).__qualname__, repr(value))
        if isinstance(value, dtensor_types.DTensorSpec):
            return ("spec", self.of(value.mesh), *self._fields(value, {"mesh"}))
        if type(value) is functools.partial:
            return ("partial", *map(self.of, (value.func, value.args, value.keywords)))
        return self.identity(value)

    def _held(self, variable: contextvars.ContextVar[Any]) -> Content:
        value = variable.get(frame_values.UNSET)
        return "unset" if value is frame_values.UNSET else self.of(value)

    def _fields(self, value: Any, but: set[str]) -> Content:
        names = sorted(
            each for each in value.__dataclass_fields__ if each not in but and each[0] != "_"
        )
        return tuple((name, self.of(getattr(value, name))) for name in names)

    def _once(self, value: object, make: Callable[[Any], Content]) -> Content:
        known = self._known.get(id(value))
        if known is None:
            known = self._known[id(value)] = (value, digest(make(value)))
        return known[1]

    def _class(self, cls: type) -> Content:
        name = ("class", cls.__module__, cls.__qualname__)
        if not cls.__flags__ & _HEAP_TYPE:
            return name
        self._known[id(cls)] = (cls, name)  # as its own methods see it, by super()
        members = {key: self._member(item) for key, item in vars(cls).items()}
        return (
            *name,
            type(cls).__qualname__,
            tuple(self.kind(base) for base in cls.__bases__),
            tuple((key, members[key]) for key in sorted(members) if key not in _BY_CLASS),
        )

    def _member(self, item: Any) -> Content:
        if isinstance(item, (staticmethod, classmethod)):
            return (type(item).__name__, self._member(item.__func__))
        if isinstance(item, property):
            return ("property", *map(self._member, (item.fget, item.fset, item.fdel)))
        return self._part(item, strictly=False)

    def _cell(self, cell: types.CellType, strictly: bool) -> Content:
        try:
            return self._part(cell.cell_contents, strictly)
        except ValueError:
            return ("empty",)

    def _part(self, value: Any, strictly: bool) -> Content:
        """What a function or class holds. What tracing reads of it that is no code is guarded by itself."""
        if isinstance(value, types.FunctionType):
            known = self._known.get(id(value))
            if known is None:
                self._known[id(value)] = (value, ("again", value.__qualname__))
                self._known[id(value)] = (value, self.function(value, strictly))
            return self._known[id(value)][1]
        if isinstance(value, type):
            return ("class", value.__module__, value.__qualname__)
        if not strictly and not isinstance(value, (*_PLAIN, tuple)):
            return ("some", type(value).__module__, type(value).__qualname__)
        try:
            return self.of(value)
        except NotByContent:
            if strictly:
                raise
            return ("some", type(value).__qualname__)

    def _c_function(self, function: Any) -> Content:
        owner = getattr(function, "__self__", None)
        if owner is None or isinstance(owner, types.ModuleType):
            held: Content = getattr(owner, "__name__", None) or function.__module__
        else:
            held = self.identity(owner if isinstance(owner, type) else type(owner))
        return ("builtin", held, getattr(function, "__qualname__", function.__name__))

    def _mesh(self, mesh: DeviceMesh) -> Content:
        coordinate = mesh.get_coordinate()
        groups = mesh.get_all_groups() if coordinate is not None else []
        at = None if coordinate is None else tuple(coordinate)
        return ("mesh", meshes.content(mesh), at, tuple(map(self.of, groups)))


def _group(group: dist.ProcessGroup) -> Content:
    ranks = tuple(dist.get_process_group_ranks(group))
    return ("group", group.group_name, ranks, dist.get_backend(group), group.rank())


_C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
    types.ClassMethodDescriptorType,
    types.GetSetDescriptorType,
)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or by C code at run time


def digest(value: object) -> str:
    """A short digest of a content."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:_DIGITS]


@functools.lru_cache(maxsize=65536)
def _digest_of_code(code: types.CodeType, place: tuple[str, int]) -> str:
    """``place``: file and line, which code objects that are equal may differ in."""
    parts = (
        *(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        *(code.co_argcount, code.co_kwonlyargcount, code.co_posonlyargcount, code.co_flags),
        *(code.co_name, *place, tuple(map(_constant, code.co_consts))),
    )
    return digest(parts)


def code_digest(code: types.CodeType) -> str:
    """A digest of a function's code: what it does, its file and first line, and the same of functions inside it."""
    return _digest_of_code(code, (code.co_filename, code.co_firstlineno))


def _constant(value: object) -> object:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, frozenset):
        return ("frozenset", sorted(map(repr, value)))
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    return (type(value).__name__, repr(value))
