"""``DTensor(local, spec, requires_grad=...)`` while tracing, and with it all that ends in it.

``distribute_tensor``, ``zeros``, ``ones``, ``empty`` and ``full`` are Python that traces, up to this
call: a spec is no value of a graph. Its mesh, placements, shape and stride are.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat import (
    dtensor_specs,
    dynamo_building,
    dynamo_dtensors,
    dynamo_trackers,
)
from dynamo_dist.torch_compat.patching import Change

log = logging.getLogger(__name__)


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
    wanted = dynamo_building.constants([bound["requires_grad"]], {})
    if wanted is None or wanted[0][0]:
        dynamo_building.graph_break(
            "New DTensor that requires gradients",
            "DTensor(..., requires_grad=True)",
            "A tensor made inside a compiled function cannot be a leaf that collects gradients.",
            "Make it outside the compiled function, or make it without requires_grad and let an "
            "input that requires gradients take part: y = distribute_tensor(x.detach(), mesh, ...)",
        )
    return dynamo_building.call_traced(tx, construct, [bound["local_tensor"], bound["spec"]], {})


_FROM_LOCAL = inspect.signature(
    lambda local_tensor, device_mesh=None, placements=None, *, run_check=False, **others: None
)


def from_local(tx: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """``DTensor.from_local`` with the mesh of ``with mesh:``; a check over all ranks breaks the graph."""
    try:
        given = _FROM_LOCAL.bind(*args, **kwargs).arguments
    except TypeError:
        return None  # stock raises what eager raises
    if "run_check" in given and dynamo_building.constants([given["run_check"]], {}) != (
        [False],
        {},
    ):
        dynamo_building.graph_break(
            "DTensor.from_local with run_check",
            "DTensor.from_local(..., run_check=True)",
            "The check compares Python objects that all ranks send, which no graph can hold.",
            "Check once outside the compiled function, and inside it use "
            "DTensor.from_local(x, mesh, placements, run_check=False)",
        )
    _warn_of_another_cut(given)
    mesh = given.get("device_mesh")
    if mesh is not None and dynamo_building.constants([mesh], {}) != ([None], {}):
        return None
    kwargs = {name: value for name, value in kwargs.items() if name != "device_mesh"}
    mesh = dynamo_building.call_traced(tx, dynamo_dtensors.current_mesh, [], {})
    return dynamo_building.call_traced(tx, DTensor.from_local, [args[0], mesh, *args[2:]], kwargs)


def _warn_of_another_cut(given: dict[str, Any]) -> None:
    """Say where a local tensor is not this rank's part of the shape that is given with it, as torch cuts it.

    Not raised: no other rank would know of it.
    """
    local = given["local_tensor"]
    cut = [given.get("others", {}).get("shape"), given.get("device_mesh"), given.get("placements")]
    if None in cut or not dynamo_dtensors.is_tensor_of(local, torch.Tensor):
        return
    known = dynamo_building.constants(cut, {})
    if known is None or None in known[0]:
        return
    whole, mesh, placements = known[0]
    found = tuple(dynamo_building.fake_tensor(local).shape)
    if mesh.get_coordinate() is None or not all(isinstance(size, int) for size in found):
        return  # a rank that has no part, or sizes that are known when the graph runs
    part = dtensor_specs.own_shape(whole, mesh, placements)
    if found != part:
        log.warning(
            "DTensor.from_local got a local tensor of shape %s for shape %s and placements %s on %s, of which this "
            "rank's part is %s as torch cuts it: results are wrong where the DTensor is gathered or cut again. Cut as "
            "torch.chunk does, or pad the shards.",
            found,
            tuple(whole),
            tuple(placements),
            mesh,
            part,
        )


def construction_changes() -> list[Change]:
    """List the changes that enabling makes for ``DTensor(...)`` and ``from_local``."""
    return [
        *dynamo_trackers.on_construction(DTensor, answer),
        *dynamo_trackers.on_function(DTensor.from_local, from_local),
    ]
