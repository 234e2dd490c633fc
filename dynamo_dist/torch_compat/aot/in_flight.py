"""Tensors whose collective is in flight, written to."""

from __future__ import annotations

import functools
from typing import Any

from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._pytree import tree_leaves

from dynamo_dist.torch_compat.changes import Change, WrapAttribute


def write_to_in_flight() -> list[Change]:
    """Let in-place ops on a tensor in flight that enters a graph write to the tensor itself.

    From 2.12 on AOTAutograd waits for such inputs before the graph. Up to 2.11 the graph does, and what
    it waits for is another tensor, so that a write to that is lost.
    """
    if hasattr(ViewAndMutationMeta, "act_input_indices"):
        return []

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def dispatch(
            func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if func._schema.is_mutable:
                for tensor in tree_leaves((args, kwargs)):
                    if not isinstance(tensor, AsyncCollectiveTensor) or tensor.completed:
                        continue
                    if isinstance(tensor.elem, FunctionalTensor):
                        tensor.elem.copy_(tensor.trigger_wait())
                    elif isinstance(tensor.elem, FakeTensor):
                        tensor.completed = True  # what the graph made of it is written back
            return stock(func, types, args, kwargs)

        return staticmethod(dispatch)

    return [WrapAttribute(AsyncCollectiveTensor, "__torch_dispatch__", changed)]
