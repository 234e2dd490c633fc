"""Meshes in the keys of torch's compile caches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh

from dynamo_dist.torch_compat.changes import Change, WrapAttribute


def meshes_by_content(content: Callable[..., str]) -> list[Change]:
    """Have a mesh stand in the keys of AOTAutograd's and Inductor's caches by ``content``, what it holds.

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
