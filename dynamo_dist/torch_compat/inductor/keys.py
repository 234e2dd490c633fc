"""What torch's compile caches take for another program in each process: meshes and names made of addresses."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.torch_compat.changes import Change, WrapAttribute, has

#: A global that we have Dynamo install: the object's ``id`` and the number of the trace in this process.
_OWN_GLOBAL = re.compile(r"__dynamo_dist\w*?_\d+_c\d+")


def meshes_by_content(content: Callable[..., str]) -> list[Change]:
    """Have a mesh stand in the keys of AOTAutograd's and Inductor's caches by ``content``, what it holds.

    Both pickle a mesh that is an input of a graph with what Python's ``hash`` said of it, which is another number in each
    process: no such graph is ever found again. ``FxGraphCachePickler._reduce_fake_script_object`` was seen in 2.13 and
    2.14.
    """
    from torch._inductor.codecache import FxGraphCachePickler

    name = "_reduce_fake_script_object"
    if not has(FxGraphCachePickler, name, off="graphs that take meshes are not cached"):
        return []

    def changed(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def reduce(self: Any, stand_in: FakeScriptObject) -> tuple[Callable[..., Any], Any]:
            if isinstance(stand_in.real_obj, DeviceMesh):
                return str, (
                    content(stand_in.real_obj, of_rank=type(self) is not FxGraphCachePickler),
                )
            reduced: tuple[Callable[..., Any], Any] = stock(self, stand_in)
            return reduced

        return reduce

    return [WrapAttribute(FxGraphCachePickler, name, changed)]


def sources_by_name() -> list[Change]:
    """Have where a graph's inputs come from stand in AOTAutograd's key without addresses of this process.

    Dynamo names a global that it installs by the ``id`` of the object. A program that reads objects of ours, FSDP2's
    parameters and their meshes, is found again only if these names are numbered as they come.
    ``AOTAutogradCachePickler._reduce_aot_config`` was seen in 2.13 and 2.14.
    """
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCachePickler

    name = "_reduce_aot_config"
    if not has(AOTAutogradCachePickler, name, off="graphs of FSDP2 and DDP are not cached"):
        return []

    def changed(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def reduce(self: Any, aot_config: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
            made, parts = stock(self, aot_config)
            sources = aot_config.aot_autograd_arg_pos_to_source
            stable = numbered(sources or ())
            return made, tuple(
                stable if part is sources and stable is not None else part for part in parts
            )

        return reduce

    return [WrapAttribute(AOTAutogradCachePickler, name, changed)]


def numbered(sources: Sequence[Any]) -> list[str] | None:
    """Dynamo's sources as text, our globals numbered in order of appearance; None where none of them is ours."""
    numbers: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return numbers.setdefault(found.group(), f"__dynamo_dist_{len(numbers)}")

    written = [
        _OWN_GLOBAL.sub(number, f"{type(source).__name__} {getattr(source, 'name', source)}")
        for source in sources
    ]
    return written if numbers else None
