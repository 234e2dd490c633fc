"""``torch.distributed.tensor.rand`` and ``randn`` on the CPU."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed.tensor._api as _api

from dynamo_dist.torch_compat.changes import Change, WrapAttribute


def random_on_cpu() -> list[Change]:
    """``rand`` and ``randn`` on the CPU, which stock refuses: made empty, then filled. Seen in 2.13 to 2.15."""

    def wrap(stock: Any) -> Any:
        @functools.wraps(stock)
        def made(init_op: Any, size: Any, *layout: Any, **kwargs: Any) -> Any:
            if init_op not in (torch.rand, torch.randn):
                return stock(init_op, size, *layout, **kwargs)
            empty = stock(torch.empty, size, *layout, **{**kwargs, "requires_grad": False})
            if empty.device_mesh.device_type != "cpu":
                return stock(init_op, size, *layout, **kwargs)
            filled = empty.uniform_() if init_op is torch.rand else empty.normal_()
            return filled.requires_grad_(kwargs["requires_grad"])

        return made

    return [WrapAttribute(_api, "_dtensor_init_helper", wrap, traced=True)]
