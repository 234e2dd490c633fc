"""Code that Inductor has compiled: called, cached, and keyed in the same way in all processes."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCachePickler
from torch._inductor import config
from torch._inductor.codecache import FxGraphCachePickler
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.runtime import cache_dir_utils
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.torch_compat.patching import Patch, Upstream, WrapFunction, has

# In a block of it, operators skip the kernels of autograd.
below_autograd: Any = getattr(torch._C, "_AutoDispatchBelowAutograd", None)


def wrap_compiled_code(
    wrap: Callable[[Callable[..., Any], str], Callable[..., Any]],
) -> list[Patch]:
    """``wrap(call, source)`` stands for what runs a graph that Inductor has compiled or loaded from
    a cache.

    ``source`` is its Python code; code in C++ stays as it is. Empty where this torch cannot call
    below autograd. ``CompiledFxGraph.post_compile``, ``current_callable`` and ``source_code`` were
    seen in 2.11 to 2.15.
    """
    off = "compiled graphs call operators through autograd, which takes longer"
    if not has(torch._C, "_AutoDispatchBelowAutograd", off=off):
        return []
    if not has(CompiledFxGraph, "post_compile", off=off):
        return []

    def post_compile(upstream: Upstream, self: Any, *args: object, **kwargs: object) -> None:
        upstream(self, *args, **kwargs)
        source = getattr(self, "source_code", None)
        if isinstance(source, str) and self.current_callable and not config.cpp_wrapper:
            self.current_callable = wrap(self.current_callable, source)

    return [WrapFunction(CompiledFxGraph, "post_compile", post_compile)]


def cache_dir() -> str:
    """Inductor's cache folder."""
    return str(cache_dir_utils.cache_dir())


def cacheable(functions: Mapping[str, str]) -> contextlib.AbstractContextManager[Any]:
    """Let AOTAutograd's cache keep graphs that call ``functions``: qualified names with a digest
    each.
    """
    cached = {**config.unsafe_marked_cacheable_functions, **functions}
    return config.patch(unsafe_marked_cacheable_functions=cached)


# : A global that we have Dynamo install: the object's ``id`` and the number of the trace in this
# process.
_OWN_GLOBAL = re.compile(r"__dynamo_dist\w*?_\d+_c\d+")


def meshes_by_content(content: Callable[..., str]) -> list[Patch]:
    """Have a mesh stand in the keys of AOTAutograd's and Inductor's caches by ``content``, what it
    holds.

    Both pickle a mesh that is an input of a graph with what Python's ``hash`` said of it, which is
    another number in each process: no such graph is ever found again.
    ``FxGraphCachePickler._reduce_fake_script_object`` was seen in 2.13 and 2.14.
    """
    name = "_reduce_fake_script_object"
    if not has(FxGraphCachePickler, name, off="graphs that take meshes are not cached"):
        return []

    def reduce(
        upstream: Upstream, self: Any, stand_in: FakeScriptObject
    ) -> tuple[Callable[..., Any], Any]:
        if isinstance(stand_in.real_obj, DeviceMesh):
            return str, (content(stand_in.real_obj, of_rank=type(self) is not FxGraphCachePickler),)
        reduced: tuple[Callable[..., Any], Any] = upstream(self, stand_in)
        return reduced

    return [WrapFunction(FxGraphCachePickler, name, reduce)]


def sources_by_name() -> list[Patch]:
    """Have where a graph's inputs come from stand in AOTAutograd's key without addresses of this
    process.

    Dynamo names a global that it installs by the ``id`` of the object. A program that reads objects
    of ours, FSDP2's parameters and their meshes, is found again only if these names are numbered as
    they come. ``AOTAutogradCachePickler._reduce_aot_config`` was seen in 2.13 and 2.14.
    """
    name = "_reduce_aot_config"
    if not has(AOTAutogradCachePickler, name, off="graphs of FSDP2 and DDP are not cached"):
        return []

    def reduce(
        upstream: Upstream, self: Any, aot_config: Any
    ) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        made, parts = upstream(self, aot_config)
        sources = aot_config.aot_autograd_arg_pos_to_source
        stable = numbered(sources or ())
        return made, tuple(
            stable if part is sources and stable is not None else part for part in parts
        )

    return [WrapFunction(AOTAutogradCachePickler, name, reduce)]


def numbered(sources: Sequence[object]) -> list[str] | None:
    """Dynamo's sources as text, our globals numbered in order of appearance; None where none of
    them is ours.
    """
    numbers: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return numbers.setdefault(found.group(), f"__dynamo_dist_{len(numbers)}")

    written = [
        _OWN_GLOBAL.sub(number, f"{type(source).__name__} {getattr(source, 'name', source)}")
        for source in sources
    ]
    return written if numbers else None
