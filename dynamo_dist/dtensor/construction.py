"""``DTensor(local, spec, requires_grad=...)`` while tracing, and with it all that ends in it.

``distribute_tensor``, ``zeros``, ``ones``, ``empty`` and ``full`` are Python that traces, up to this
call: a spec is no value of a graph. Its mesh, placements, shape and stride are.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from dynamo_dist import _torch


def construct(local: torch.Tensor, spec: Any) -> DTensor:
    """Traced: the DTensor of the local tensor, without its autograd history, as the class makes it."""
    meta = spec.tensor_meta
    return DTensor.from_local(
        local.detach(),
        spec.mesh,
        spec.placements,
        run_check=False,
        shape=meta.shape,
        stride=meta.stride,
    )


_SIGNATURE = inspect.signature(lambda local_tensor, spec, *, requires_grad: None)


def answer(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of the constructor; a new leaf that requires gradients breaks the graph."""
    try:
        bound = _SIGNATURE.bind(*args, **kwargs).arguments
    except TypeError:
        return None  # stock raises what eager raises
    wanted = _torch.constants([bound["requires_grad"]], {})
    if wanted is None or wanted[0][0]:
        _torch.graph_break(
            "New DTensor that requires gradients",
            "DTensor(..., requires_grad=True)",
            "A tensor made inside a compiled function cannot be a leaf that collects gradients.",
            "Make it outside the compiled function, or make it without requires_grad and let an "
            "input that requires gradients take part: y = distribute_tensor(x.detach(), mesh, ...)",
        )
    return _torch.call_traced(tx, construct, [bound["local_tensor"], bound["spec"]], {})


def global_tensor_info(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[list[int], list[int]]:
    """Traced: global shape and stride of evenly sharded local tensors; torch computes it in C++."""
    shape, stride = list(tensor.size()), list(tensor.stride())
    for mesh_dim, placement in enumerate(placements):
        if not placement.is_shard():
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        if dim < 0:
            raise AssertionError("Shard placements should have negative dims normalized.")
        count = mesh.size(mesh_dim)
        shape[dim] = shape[dim] * count
        for other in range(len(stride)):
            if other != dim and stride[other] >= stride[dim]:
                stride[other] = stride[other] * count
    return shape, stride


def _global_tensor_info(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return _torch.call_traced(tx, global_tensor_info, args, kwargs)


def changes() -> list[_torch.Change]:
    """What enabling does for the constructor, and for what is computed before it in C++."""
    found = _torch.on_construction(DTensor, answer)
    if (function := _torch.global_tensor_info_in_c) is not None:
        found += _torch.on_function(function, _global_tensor_info)
    return found
