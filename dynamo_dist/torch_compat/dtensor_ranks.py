"""All ranks of a mesh in one process, and ``rand`` and ``randn`` of DTensors on the CPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.tensor._api as _api
from torch.distributed._local_tensor import local_tensor_mode, maybe_disable_local_tensor_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from dynamo_dist.torch_compat.patching import (
    Patch,
    SetAttribute,
    Upstream,
    WrapAttribute,
    WrapFunction,
    applied,
)


def random_on_cpu() -> list[Patch]:
    """``rand`` and ``randn`` on the CPU, which upstream refuses: made empty, then filled. Seen
    in 2.13 to 2.15.
    """

    def wrap(upstream: Any) -> Any:
        @functools.wraps(upstream)
        def made(init_op: Any, size: Any, *layout: Any, **kwargs: Any) -> Any:
            if init_op not in (torch.rand, torch.randn):
                return upstream(init_op, size, *layout, **kwargs)
            empty = upstream(torch.empty, size, *layout, **{**kwargs, "requires_grad": False})
            if empty.device_mesh.device_type != "cpu":
                return upstream(init_op, size, *layout, **kwargs)
            filled = empty.uniform_() if init_op is torch.rand else empty.normal_()
            return filled.requires_grad_(kwargs["requires_grad"])

        return made

    return [WrapAttribute(_api, "_dtensor_init_helper", wrap, traced=True)]


def dtensor_of_ranks(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    like: torch.Tensor,
    requires_grad: bool,
) -> DTensor:
    """A leaf with the global shape, strides and dtype of ``like``."""
    meta = TensorMeta(like.shape, like.stride(), like.dtype)
    return DTensor(
        local, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=requires_grad
    )


def fit_for_all_ranks() -> contextlib.AbstractContextManager[None]:
    """Have DTensor derive global shapes once for all ranks, and mask without indices."""

    def once(upstream: Upstream, self: Any, *args: Any) -> object:
        with maybe_disable_local_tensor_mode():
            return upstream(self, *args)

    def apply_mask(self: Any, tensor: torch.Tensor) -> None:
        mask = self.data if self.data.ndim == tensor.ndim else self.data.unsqueeze(-1)
        tensor.masked_fill_(mask, 0.0)

    # A mask picks as many elements as it likes on each rank, and the mode has one shape for all.
    return applied(
        WrapFunction(ShardingPropagator, "_propagate_tensor_meta_non_cached", once),
        SetAttribute(MaskBuffer, "apply_mask", apply_mask),
    )


def are_all_ranks_here() -> bool:
    """Return whether this process stands for every rank; a plain local tensor is then that of
    all of them.
    """
    return local_tensor_mode() is not None


def one_device() -> contextlib.AbstractContextManager[None]:
    """Inside, operators on plain tensors run once, not once for each rank."""
    return maybe_disable_local_tensor_mode()
