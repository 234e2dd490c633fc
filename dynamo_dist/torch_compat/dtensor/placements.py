"""Placements: how they cut a tensor, empty and strided shards."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed.tensor._ops._view_ops as _view_ops
import torch.distributed.tensor.placement_types as _placement_types
from torch._C import _get_dispatch_mode
from torch._C import _TorchDispatchModeKey as _ModeKey
from torch.distributed.tensor import DTensor, Partial
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes

from dynamo_dist.torch_compat.changes import Change, SetAttribute, WrapAttribute, has
from dynamo_dist.torch_compat.dtensor.types import DTensorSpec, TensorMeta

KEPT_OFFSETS = 64
_partition_value: Any = vars(Partial)["_partition_value"]


def cut_empty_shards() -> list[Change]:
    """Have the shards of ranks for which nothing is left be cut off the tensor, as those of all ranks are.

    Stock makes them of zeros. Inductor then knows on such a rank alone what a launch sends, runs it in
    the forward instead of the backward, or not at all where its result is cut, and the ranks hang. Seen
    in 2.13 to 2.15.
    """

    def fill(shards: list[torch.Tensor], dim: int, missing: int) -> list[torch.Tensor]:
        return [*shards, *[shards[0].narrow(dim, 0, 0).clone()] * missing]

    return [SetAttribute(_placement_types, "fill_empty_tensor_to_shards", fill)]


def keep_strided_shards() -> list[Change]:
    """A DTensor that a view left in strided shards goes through AOTAutograd's flattening and back.

    Such a view says by a flag that the order of its shards stands beside its placements; the flattened
    form lacks the flag, and an order that is there shows it was set. Seen in torch 2.13 to 2.15.
    """
    stock = DTensor.__tensor_unflatten__

    @functools.wraps(stock)
    def unflatten(inner: Any, context: Any, size: Any, stride: Any) -> Any:
        placements, meta, *rest = context
        if len(rest) != 2 or rest[0] is None or not any(map(_is_strided_shard, placements)):
            return stock(inner, context, size, stride)
        spec = DTensorSpec(
            inner["device_mesh"],
            placements,
            tensor_meta=TensorMeta(size, stride, meta.dtype),
            shard_order=rest[0],
            use_strided_shard_as_shard_order=False,
        )
        return DTensor(inner["_local_tensor"], spec, requires_grad=rest[1])

    return [SetAttribute(DTensor, "__tensor_unflatten__", staticmethod(unflatten))]


def _is_strided_shard(placement: Any) -> bool:
    return isinstance(placement, _placement_types._StridedShard)


def count_strided_shards_with_real_tensors() -> list[Change]:
    """Compute the size of a strided shard with real tensors while tracing, not with fakes.

    Otherwise each index becomes an unknown size of the program's graph. Seen in torch 2.13 to 2.15.
    """
    cls, name = _placement_types._StridedShard, "local_shard_size_and_offset"
    if not has(cls, name, off="strided shards may not trace"):
        return []
    stock: Any = vars(cls)[name]

    @functools.wraps(stock)
    def size_and_offset(*args: Any, **kwargs: Any) -> Any:
        fake = _get_dispatch_mode(_ModeKey.FAKE) is not None
        args, kwargs = _pytree.tree_map_only(torch.SymInt, _known_size, (args, kwargs))
        if not fake or any(isinstance(arg, torch.SymInt) for arg in (*args, *kwargs.values())):
            return stock(*args, **kwargs)
        return counted(*args, **kwargs)

    @functools.lru_cache(maxsize=KEPT_OFFSETS)  # a list as long as the dimension
    def counted(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return stock(*args, **kwargs)

    return [SetAttribute(cls, name, size_and_offset)]


def _known_size(size: torch.SymInt) -> int | torch.SymInt:
    """The number, where guards have fixed a symbolic size."""
    known = size.node.maybe_as_int()
    return size if known is None else known


def fix_split_factors() -> list[Change]:
    """With dynamic sizes, a view that joins dimensions is laid out as in eager.

    Where a dimension behind the first is sharded, the product of those before it is how often its shards
    lie in the joined one, and must be a number: these sizes are fixed, by guards. Stock refuses the
    view; on meshes of several dimensions the tensor is gathered as before.
    """
    cls = _view_ops._ViewShardingPropagator

    def changed(stock: Any) -> Any:
        @functools.wraps(stock)
        def rewrite(
            self: Any, p: Any, mesh_dim: int, placements: Any, claimed: Any, sizes: Any, *args: Any
        ) -> Any:
            sizes = list(sizes)
            several = len(self.mesh_sizes) > 1
            for joined in () if several else self.rule:
                if isinstance(joined, _view_ops.Flatten):
                    dims = [getattr(dim, "input_dim", None) for dim in joined.input_dims]
                    for dim in dims[: dims.index(p.dim)] if p.dim in dims else ():
                        if not has_free_unbacked_symbols(sizes[dim]):
                            sizes[dim] = int(sizes[dim])
            return stock(self, p, mesh_dim, placements, claimed, sizes, *args)

        return rewrite

    return [WrapAttribute(cls, "_rewrite_plain_shard", changed)]
