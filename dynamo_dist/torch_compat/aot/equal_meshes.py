"""Equal meshes in a traced graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental import proxy_tensor

from dynamo_dist.torch_compat.changes import Change, WrapAttribute


def equal_meshes_are_one() -> list[Change]:
    """Let a mesh that comes in with a gradient be the equal one that came in with an argument.

    DTensor's sharding decisions are kept under keys that compare, so that a result may have the mesh of an earlier
    program, equal to this one's and another object. AOTAutograd knows it from the result's gradient alone: the forward
    would return what only the backward has ("Node tangents_2 was invalid, but is output"). Seen in 2.13 to 2.15.
    """

    def changed(stock: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stock)
        def set_proxy_slot(obj: Any, tracer: Any, proxy: Any) -> None:
            mesh, proxies = _real(obj), getattr(tracer, "_opaque_real_obj_proxy", None)
            if isinstance(mesh, DeviceMesh) and proxies is not None and id(mesh) not in proxies:
                for other, known in tracer.opaque_tracker.items():
                    if isinstance(_real(other), DeviceMesh) and _real(other) == mesh:
                        proxies[id(mesh)] = known
                        break
            stock(obj, tracer, proxy)

        return set_proxy_slot

    return [WrapAttribute(proxy_tensor, "set_proxy_slot", changed)]


def _real(obj: Any) -> object:
    """The object behind its stand-in while tracing."""
    try:
        return object.__getattribute__(obj, "real_obj")
    except AttributeError:
        return None
