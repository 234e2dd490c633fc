"""Meshes in the keys of torch's compile caches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.torch_compat.changes import Change, WrapAttribute

# Made of others, or without meaning in another process.
_NOT_CONTENT = ("_hash", "_pg_registry")
# This process's place in it, which a graph that is traced has as numbers.
_OF_THE_RANK = ("_rank", "_coordinate_on_dim", "_dim_group_names")


def meshes_by_content() -> list[Change]:
    """Have a mesh stand in the keys of AOTAutograd's and Inductor's caches by what it holds.

    Both pickle a mesh that is an input of a graph with what Python's ``hash`` said of it, which is another number in each
    process: no such graph is ever found again. ``FxGraphCachePickler._reduce_fake_script_object`` was seen in 2.11 to
    2.14; in 2.11 meshes are not among a graph's inputs.
    """
    from torch._inductor.codecache import FxGraphCachePickler

    name = "_reduce_fake_script_object"
    if not hasattr(FxGraphCachePickler, name):
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


def content(mesh: DeviceMesh, *, of_rank: bool = True) -> str:
    """Return all that a mesh holds, as text that is the same in every process of this rank: layout, groups, coordinate.

    Without ``of_rank``, the same in every process of the job: Inductor compiles what was traced with the mesh before.

    A submesh and its root hold each other: a mesh that was met before is its number.
    """
    met: dict[int, int] = {}
    left_out = _NOT_CONTENT if of_rank else (*_NOT_CONTENT, *_OF_THE_RANK)

    def text(value: object) -> str:
        if isinstance(value, DeviceMesh):
            if id(value) in met:
                return f"mesh {met[id(value)]}"
            met[id(value)] = len(met)
            held = {name: each for name, each in vars(value).items() if name not in left_out}
            return f"{type(value).__qualname__} {text(held)}"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {text(value[key])}" for key in sorted(value)) + "}"
        return repr(value.tolist() if isinstance(value, torch.Tensor) else value)

    return text(mesh)
