"""Modules whose parameters are read whole inside forward and stay sharded everywhere else."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dynamo_dist.parallel.gather import Gather, cast_floating
from dynamo_dist.parallel.pickling import reduced_as

_GATHERS = "_data_parallel_gathers"
_INPUT_DTYPE = "_data_parallel_input_dtype"
_FORWARD = "_data_parallel_forward"  # the module's own, where it is no method of its class


class _Inside(threading.local):
    """The number of forwards of managed modules that this thread runs in eager mode."""

    depth = 0


_inside = _Inside()


def is_managed(module: nn.Module) -> bool:
    """Return whether parameters of this very module are data parallel, or forward begins with it."""
    return _GATHERS in vars(module)


def manage(
    module: nn.Module, gathers: Mapping[str, Gather], input_dtype: torch.dtype | None = None
) -> None:
    """Read the parameters in ``gathers`` through them, in every forward of ``module``.

    ``vars(module)["_parameters"]``, hence ``parameters()``, ``state_dict()`` and optimizers, keep
    the sharded ones, and so does ``module.weight`` outside forward, as an initialiser wants it.
    Floating-point inputs of forward are cast to ``input_dtype``. The module's class becomes a
    subclass; modules of one class share it, so that one compiled function serves them all.
    """
    setattr(module, _GATHERS, dict(gathers))
    setattr(module, _INPUT_DTYPE, input_dtype)
    setattr(module, _FORWARD, vars(module).pop("forward", None))
    module.__class__ = _subclass(type(module), frozenset(gathers))


_classes: dict[tuple[type[nn.Module], frozenset[str]], type[nn.Module]] = {}


def _subclass(base: type[nn.Module], names: frozenset[str]) -> type[nn.Module]:
    if (base, names) not in _classes:
        _classes[base, names] = _new_subclass(base, names)
    return _classes[base, names]


def _new_subclass(base: type[nn.Module], names: frozenset[str]) -> type[nn.Module]:
    def inner(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = getattr(self, _FORWARD)
        return base.forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        dtype = getattr(self, _INPUT_DTYPE)
        if dtype is not None:
            args, kwargs = cast_floating(dtype, (args, kwargs))
        if torch.compiler.is_compiling():
            return inner(self, *args, **kwargs)
        with _gathering():
            return inner(self, *args, **kwargs)

    name = f"DataParallel{base.__name__}"
    # Recompiles are counted by code object: a shared one would hold so many classes and no more.
    forward.__code__ = forward.__code__.replace(co_qualname=f"{name}.forward")
    members: dict[str, Any] = {name: _gathered(name) for name in names}
    members["forward"] = functools.wraps(base.forward)(forward)
    members["__reduce_ex__"] = reduced_as(base, _subclass, names)
    return type(name, (base,), members)


def _gathered(name: str) -> property:
    def read(self: nn.Module) -> torch.Tensor | None:
        param = self._parameters[name]
        if param is None or not (torch.compiler.is_compiling() or _inside.depth):
            return param
        whole: torch.Tensor = getattr(self, _GATHERS)[name](param)
        return whole

    return property(read)


@contextmanager
def _gathering() -> Iterator[None]:
    _inside.depth += 1
    try:
        yield
    finally:
        _inside.depth -= 1
