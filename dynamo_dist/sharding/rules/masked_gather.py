"""Gather of one element along a sharded dimension, as the logits of labels are: each rank its own.

A rank has what an index picks or has not, and puts zero in its place: the result is pending as a sum,
and nothing is launched. Torch does the same with a placement that keeps the mask until the sum, of which
two that are pending at once refuse each other; here the mask is of one call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from dynamo_dist.sharding.fallback import Decompose
from dynamo_dist.sharding.rows import P, is_whole, strategy
from dynamo_dist.sharding.rules import indexing
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs

GATHER = "aten.gather.default"


def of_own_part(stock: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """In the place of torch's: ``indexing.gather``, unless each rank's own part is all that is needed."""
    decide = strategy(indexing.gather, any_part=True)

    def by_layout(schema: dtensor_specs.OpSchema) -> Any:
        self, dim, index = schema.args_schema[:3]
        if split_along(self, dim, index) is not None:
            raise Decompose(run)
        return decide(schema)

    return by_layout


def split_along(self: Any, dim: Any, index: Any) -> int | None:
    """The mesh dimension along which alone ranks have other parts to pick from, and pick one from all."""
    of_self, of_index = (each.strategies[0].output_spec for each in (self, index))
    shape, picked = of_self.shape, of_index.shape
    if not shape or len(shape) != len(picked):
        return None
    dim %= len(shape)
    found = [at for at, placement in enumerate(of_self.placements) if placement == Shard(dim)]
    if len(found) != 1 or picked[dim] != 1 or not is_whole(of_self.mesh, of_self.placements, shape):
        return None
    beside = [
        (p, q)
        for at, (p, q) in enumerate(zip(of_self.placements, of_index.placements, strict=True))
        if at != found[0]
    ]
    alike = [
        p == q and (p.is_replicate() or (type(p) is Shard and shape[p.dim] == picked[p.dim]))
        for p, q in beside
    ]
    return found[0] if all(alike) and not of_index.placements[found[0]].is_partial() else None


def run(self: DTensor, dim: int, index: DTensor, *, sparse_grad: bool = False) -> DTensor:
    """``torch.gather`` where ``split_along`` gives a mesh dimension."""
    mesh, dim = self.device_mesh, dim % self.ndim
    at = self.placements.index(Shard(dim))
    kept = [*index.placements]
    kept[at] = Replicate()
    everyones = index.redistribute(placements=kept)._local_tensor
    own, elsewhere = dtensor_specs.own_part_of_index(everyones, mesh, at, self.shape, dim)
    picked = torch.gather(self._local_tensor, dim, own)
    pending = [*kept]
    pending[at] = P
    meta = dtensor_specs.TensorMeta(
        index.shape, torch.empty(index.shape, device="meta").stride(), self.dtype
    )
    found: DTensor = dtensor_specs.wrap(picked.masked_fill(elsewhere, 0), mesh, pending, meta)
    return found


MASKED_GATHER_WRAPPED = {GATHER: of_own_part}
