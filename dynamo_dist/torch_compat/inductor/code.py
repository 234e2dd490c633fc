"""Code that Inductor has compiled, called; and its caches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from dynamo_dist.torch_compat.changes import Change, WrapAttribute

# In a block of it, operators skip the kernels of autograd.
below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)


def wrap_compiled_code(
    wrap: Callable[[Callable[..., Any], str], Callable[..., Any]],
) -> list[Change]:
    """``wrap(call, source)`` stands for what runs a graph that Inductor has compiled or loaded from a cache.

    ``source`` is its Python code; code in C++ stays as it is. Empty where this torch cannot call below
    autograd. ``CompiledFxGraph.post_compile``, ``current_callable`` and ``source_code`` were seen in 2.13
    to 2.15.
    """
    from torch._inductor import config
    from torch._inductor.output_code import CompiledFxGraph

    if below_autograd is None or not hasattr(CompiledFxGraph, "post_compile"):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def post_compile(self: Any, *args: Any, **kwargs: Any) -> None:
            stock(self, *args, **kwargs)
            source = getattr(self, "source_code", None)
            if isinstance(source, str) and self.current_callable and not config.cpp_wrapper:
                self.current_callable = wrap(self.current_callable, source)

        return post_compile

    return [WrapAttribute(CompiledFxGraph, "post_compile", changed)]


def note_compiled_code(
    note: Callable[[object, Callable[..., Any], str, Iterable[str], str], None],
) -> list[Change]:
    """Call ``note`` with each graph that Inductor has compiled or loaded, its function, source, counts and how it runs.

    That is ``cpu`` where it runs on the CPU alone, ``cuda``, or ``cuda graph`` where a CUDA graph may replay it; graphs of
    other devices are not noted. ``CompiledFxGraph.post_compile``, ``current_callable``, ``source_code``, ``device_types`` and
    ``counter_deltas`` were seen in 2.13 to 2.15, its ``graph_kwargs["cudagraphs"]`` in 2.13: without it, ``cuda graph``.
    """
    from torch._inductor import config
    from torch._inductor.output_code import CompiledFxGraph

    if not hasattr(CompiledFxGraph, "post_compile"):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def post_compile(self: Any, *args: Any, **kwargs: Any) -> None:
            source, call = getattr(self, "source_code", None), self.current_callable
            stock(self, *args, **kwargs)
            devices = set(getattr(self, "device_types", ("unknown",)))
            runs = "cpu"
            if "cuda" in devices:
                runs = "cuda graph" if _is_replayed((*args, *kwargs.values())) else "cuda"
            known = devices <= {"cpu", "cuda"}
            if isinstance(source, str) and call and known and not config.cpp_wrapper:
                counts = tuple(getattr(self, "counter_deltas", None) or ())
                note(self, call, source, counts, runs)

        return post_compile

    return [WrapAttribute(CompiledFxGraph, "post_compile", changed)]


def _is_replayed(arguments: Iterable[Any]) -> bool:
    """Return whether ``post_compile`` with these has left a graph to CUDA graphs, as far as they say."""
    for each in arguments:
        if isinstance(each, Mapping) and "cudagraphs" in each:
            return bool(each["cudagraphs"])
    return True


def cache_dir() -> str:
    """Inductor's cache folder."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as stock

    return str(stock())


@contextlib.contextmanager
def cacheable(functions: Mapping[str, str]) -> Iterator[None]:
    """Let AOTAutograd's cache keep graphs that call ``functions``: qualified names with a digest each."""
    from torch._inductor import config

    name = "unsafe_marked_cacheable_functions"
    known = getattr(config, name, None)
    if known is None:
        yield
        return
    with config.patch({name: {**known, **functions}}):
        yield
