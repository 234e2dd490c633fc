"""``as_strided``, which speaks of memory and not of elements."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from dynamo_dist.errors import StrategyError
from dynamo_dist.sharding import gathered
from dynamo_dist.torch_compat import dtensor_specs, dtensor_strategies
from dynamo_dist.torch_compat.patching import Change


def handler(op: dtensor_specs.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sizes and strides of the whole tensor's memory: gathered, unless every rank has that memory.

    Raises StrategyError for a view in shards: what lies in memory around it is on no rank.
    """
    tensor, *rest = args
    sizes = [*rest, *kwargs.values()]
    if [list(tensor.shape), list(tensor.stride())] == [list(each) for each in sizes[:2]] and (
        len(sizes) < 3 or sizes[2] in (None, tensor.storage_offset())
    ):
        return torch.ops.aten.alias.default(tensor)
    replicated = all(isinstance(p, Replicate) for p in tensor.placements)
    if not replicated and tensor._is_view() and not _stays_inside(tensor, *sizes):
        raise StrategyError(
            f"{op} of a view in {tensor.placements}: its memory is not on one rank.",
            "Strides of a view reach into the tensor it is a view of, of which each rank has a part.",
            "Use the view operator that is meant, such as x[...] or x.unfold, or replicate first.",
        )
    whole = tensor
    if not replicated:
        whole = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        if whole._local_tensor.stride() != tensor.stride():
            meta = dtensor_specs.TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
            laid_out = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
            ).copy_(whole._local_tensor)
            whole = dtensor_specs.wrap(laid_out, tensor.device_mesh, whole.placements, meta)
    assert isinstance(whole, DTensor)
    return gathered.run(op, (whole, *rest), kwargs)


def _stays_inside(tensor: DTensor, size: Any, stride: Any, offset: int | None = None) -> bool:
    """Return whether all that is asked for are elements of the tensor itself."""
    reach = sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return not offset and tensor.is_contiguous() and reach < tensor.numel()


def changes() -> list[Change]:
    """List the changes that enabling makes for ``as_strided``."""
    return dtensor_strategies.on_dispatch(torch.ops.aten.as_strided.default, handler)
