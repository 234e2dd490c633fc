"""Code that Inductor has compiled, called; and its caches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from dynamo_dist.torch_compat.changes import Change, WrapAttribute, has

# In a block of it, operators skip the kernels of autograd.
below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)


def wrap_compiled_code(
    wrap: Callable[[Callable[..., Any], str], Callable[..., Any]],
) -> list[Change]:
    """``wrap(call, source)`` stands for what runs a graph that Inductor has compiled or loaded from a cache.

    ``source`` is its Python code; code in C++ stays as it is. Empty where this torch cannot call below
    autograd. ``CompiledFxGraph.post_compile``, ``current_callable`` and ``source_code`` were seen in 2.11
    to 2.15.
    """
    from torch._inductor import config
    from torch._inductor.output_code import CompiledFxGraph

    off = "compiled graphs call operators through autograd, which takes longer"
    if not has(torch._C, "_AutoDispatchBelowAutograd", off=off):
        return []
    if not has(CompiledFxGraph, "post_compile", off=off):
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
