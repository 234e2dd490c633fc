"""A kept frame as bytes, and back."""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import types
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo.source as _sources
from torch import fx

from dynamo_dist.torch_compat.dynamo.kept_frames import CannotKeep, KeptFrame

_BUILTINS = "__builtins_dict__of_kept_frames"


def dumps(frame: KeptFrame, refuse: Callable[[Any], None]) -> bytes:
    """``frame`` as bytes. ``refuse(object)`` raises for what is not to be pickled. Raises CannotKeep for what cannot be."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, frame, refuse).dump(frame)
    except (
        pickle.PicklingError,
        AttributeError,
        TypeError,
        NotImplementedError,
        RecursionError,
        ValueError,  # code that holds an object
    ) as error:
        raise CannotKeep(f"what cannot be pickled ({error})") from None
    return buffer.getvalue()


def plain_dumps(fields: dict[str, Any]) -> bytes:
    """Plain data as bytes."""
    return pickle.dumps(fields)


def plain_loads(content: bytes) -> dict[str, Any]:
    """Inverse of ``plain_dumps``."""
    fields: dict[str, Any] = pickle.loads(content)
    return fields


def loads(content: bytes, globals_: dict[str, Any]) -> KeptFrame:
    """Inverse of ``dumps``, in a process whose frame has these globals: what sources name is put there.

    Raises CannotKeep if it cannot be read, or if a name is taken.
    """
    frame, names = _read(content)
    if frame.builtins:
        names[frame.builtins] = frame.builtins = _BUILTINS
        globals_.setdefault(_BUILTINS, builtins_of(globals_))
    frame.reached = {names[name]: each for name, each in frame.reached.items()}
    frame.renamed = dict(names)
    for name, module in frame.imports.items():
        there = importlib.import_module(module)
        if globals_.setdefault(name, there) is not there:
            raise CannotKeep(f"another {name}")
    return frame


def _read(content: bytes) -> tuple[KeptFrame, dict[str, str]]:
    """A frame, and names that globals of the process that kept it have in this one."""
    unpickler = _Unpickler(io.BytesIO(content))
    try:
        return unpickler.load(), unpickler.names
    except Exception as error:  # of whatever it names
        raise CannotKeep(f"what cannot be read ({error})") from None


class _Pickler(pickle.Pickler):
    def __init__(self, file: Any, frame: KeptFrame, refuse: Callable[[Any], None]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._frame, self._refuse = frame, refuse

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, fx.Node):
            return "node", obj.name
        if type(obj) is _sources.GlobalSource and obj.global_name == self._frame.builtins:
            return "builtins", ""
        if isinstance(obj, (_sources.GlobalSource, _sources.GlobalWeakRefSource)):
            name = obj.global_name
            if name in self._frame.reached:
                return "held" if self._frame.reached[name].held else "reached", name
            if name in self._frame.addressed:
                raise CannotKeep(f"a guard on {name}, which no variable holds")
        return None

    def reducer_override(self, obj: Any) -> Any:
        self._refuse(obj)
        if isinstance(obj, torch._ops.OpOverload):
            return _operator, (obj.namespace, obj._opname, obj._overloadname)
        if isinstance(obj, torch._ops.OpOverloadPacket):
            return _operator, (*obj._qualified_op_name.split("::"), "")
        if isinstance(obj, types.CodeType):
            return marshal.loads, (marshal.dumps(obj),)
        if isinstance(obj, types.ModuleType):
            return importlib.import_module, (obj.__name__,)
        return NotImplemented


@dataclass(frozen=True, slots=True)
class Named:
    """A node of the graph, by its name."""

    name: str


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.names = _NewNames()

    def persistent_load(self, key: Any) -> Any:
        what, name = key
        if what == "node":
            return Named(name)
        if what == "reached":
            return _sources.GlobalWeakRefSource(self.names[name])
        if what == "held":
            return _sources.GlobalSource(self.names[name])
        return _sources.GlobalSource(_BUILTINS)


class _NewNames(dict[str, str]):
    """In the form of the names that Dynamo gives, which cache keys number (``torch_compat/inductor/keys.py``)."""

    def __missing__(self, name: str) -> str:
        self[name] = found = f"__dynamo_dist_{uuid.uuid4().int}_c0"
        return found


def _operator(namespace: str, name: str, overload: str) -> Any:
    """An operator; with ``overload`` "" the packet of its overloads."""
    found = getattr(getattr(torch.ops, namespace), name)
    return getattr(found, overload) if overload else found


def builtins_of(globals_: dict[str, Any]) -> dict[str, Any]:
    """The dictionary of builtins that a frame's globals have."""
    found: Any = globals_["__builtins__"]
    return found if isinstance(found, dict) else vars(found)
