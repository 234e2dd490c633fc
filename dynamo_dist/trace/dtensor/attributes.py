"""Attributes of a traced DTensor: ``hasattr``, ``getattr`` with a default, ``_spec`` of an intermediate.

Stock answers ``hasattr`` by the attributes of a plain tensor, so that a program that asks for
``to_local`` or ``full_tensor`` takes the branch for plain tensors.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from dynamo_dist.torch_compat import dtensor_specs, dynamo_building, dynamo_dtensors
from dynamo_dist.torch_compat.patching import Change


def has_tensor_attribute(tracker: Any, cls: type, name: str) -> bool | None:
    """True for what DTensor's class has; None leaves the rest, such as an instance's own, to stock.

    No guard: stock guards a DTensor's type, and what a class has does not change.
    """
    if not issubclass(cls, DTensor):
        return None
    found = inspect.getattr_static(cls, name, None)
    return True if found is not None and not isinstance(found, property) else None


def attribute(tx: Any, tracker: Any, name: str) -> Any:
    """Return an attribute that stock gets wrong, see below; None leaves the rest to stock.

    ``_local_tensor`` shares memory with the DTensor, also when it is written to. ``_spec`` of a DTensor
    that the program made cannot be built by stock. A gradient's layout breaks.
    """
    if name not in ("_local_tensor", "_spec", "placements"):
        return None
    if not isinstance(dynamo_building.fake_tensor(tracker), DTensor):
        return None
    if name == "_local_tensor":
        return dynamo_building.call_traced(tx, traced_local, [tracker], {})
    if tracker.source is not None:
        return None
    if dynamo_dtensors.is_in_backward_hook(tx):
        dynamo_building.graph_break(
            "Layout of a gradient in a backward hook",
            name,
            "How a gradient is laid out is decided when the backward graph is made, after this trace.",
            "Give the gradient a layout first: grad = grad.redistribute(mesh, [Replicate()])",
        )
    if name == "placements":
        return None
    return dynamo_building.call_traced(tx, traced_spec, [tracker], {})


def traced_local(tensor: DTensor) -> torch.Tensor:
    """Traced: the local tensor, which is outside of autograd."""
    detached: Any = tensor.detach()
    return detached.to_local()


def traced_spec(tensor: DTensor) -> Any:
    """Traced: a spec equal to ``tensor._spec``, with the global shape and stride."""
    meta = dtensor_specs.TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
    return dtensor_specs.DTensorSpec(tensor.device_mesh, tensor.placements, tensor_meta=meta)


def attributes_changes() -> list[Change]:
    """List the changes that enabling makes for attributes."""
    return dynamo_dtensors.on_tensor_attributes(has_tensor_attribute, attribute)
