"""Gathers, scatters, searches, distances and embeddings.

Where the rows of a table are sharded, each rank looks up its own, and puts zeros where an index
falls elsewhere: the result is a Partial sum. Torch does so with a placement that keeps the mask
until the sum. Two such placements that are Partial at once refuse each other, and each is reduced
once; here the mask is of one call.

A rank either has the element that an index picks, or puts zero in its place. The result is a
Partial sum, and no collective is launched. Torch does the same with a placement that keeps the mask
until the sum. Two of these that are Partial at once refuse each other; here the mask is of one
call.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from dynamo_dist.sharding.fallback import Decompose
from dynamo_dist.sharding.rows import Call, P, R, Row, Rows, is_whole, strategy
from dynamo_dist.torch_compat import dtensor_dispatch, dtensor_specs

EMBEDDING = "aten.embedding.default"


def forward(call: Call) -> list[Row]:
    """Columns, and indices; for sharded rows see ``of_own_rows``."""
    ndim = call.ndim("indices")
    return [
        # Columns of the table become the last dimension of the result.
        call.row([Shard(ndim)], weight=Shard(1)),
        *(call.row([Shard(d)], indices=Shard(d)) for d in range(ndim)),
    ]


def backward(call: Call) -> list[Row]:
    """Columns; and sums over indices, unless each rank would count how often its own indices
    occur.
    """
    ndim = call.ndim("grad_output")
    rows = [
        call.row([Shard(1)], grad_output=Shard(ndim - 1)),
        call.row([P], grad_output=P),
    ]
    # The frequency is counted over all indices, of which a shard has only some.
    if not call.args["scale_grad_by_freq"]:
        rows += [
            call.row([P], grad_output=Shard(d), indices=Shard(d))
            for d in range(call.ndim("indices"))
        ]
    return rows


def of_own_rows(upstream: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """Replace torch's strategy by ``forward``; where rows are sharded, ranks look up their own."""
    decide = strategy(forward)

    def by_layout(schema: dtensor_specs.OpSchema) -> object:
        tables: Any = schema.args_schema[:2]
        weight, indices = (each.strategies[0].output_spec.placements for each in tables)
        if (layout := layout_of_own_rows(weight, indices)) is not None:
            raise Decompose(functools.partial(look_up, *layout))
        return decide(schema)

    return by_layout


def layout_of_own_rows(
    weight: tuple[Placement, ...], indices: tuple[Placement, ...]
) -> tuple[list[Placement], list[bool]] | None:
    """Placements that the indices need, and which mesh dimensions shard rows; None where rows
    are whole or cut otherwise.
    """
    needed: list[Placement] = []
    for table, index in zip(weight, indices, strict=True):
        if type(table) is not Shard and not table.is_replicate():
            return None
        if type(index) is not Shard and not index.is_replicate():
            return None
        # Where rows are sharded every rank looks up all indices; elsewhere indices may stay
        # sharded.
        needed.append(index if table.is_replicate() else Replicate())
    by_rows = [table == Shard(0) for table in weight]
    return (needed, by_rows) if any(by_rows) else None


def look_up(
    needed: list[Placement],
    by_rows: list[bool],
    weight: DTensor,
    indices: DTensor,
    *others: object,
    **named: object,
) -> DTensor:
    """Look up indices in this rank's rows. An embedding's other arguments concern its gradient."""
    mesh, dims = weight.device_mesh, [at for at, sharded in enumerate(by_rows) if sharded]
    own: torch.Tensor = indices.redistribute(placements=needed)._local_tensor
    rows, masks = weight.shape[0], []
    for at in dims:
        own, outside = dtensor_specs.own_part_of_index(own, mesh, at, (rows,), 0)
        masks.append(outside)
        # On two mesh dimensions the rows are cut twice: the second cut is of this rank's part of
        # the first.
        if at != dims[-1]:
            rows = dtensor_specs.own_length(rows, mesh, at)
    local = weight._local_tensor
    # An embedding of an empty table is an error, even where every row is masked.
    if local.shape[0] == 0:
        found = local.new_zeros((*own.shape, local.shape[1]))
    else:
        # An index that one mesh dimension's part lacks is on another rank, whatever the others say.
        elsewhere = functools.reduce(torch.logical_or, masks)
        found = torch.ops.aten.embedding.default(local, own)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
    placements = [
        P if is_by_rows else Shard(indices.ndim) if table.is_shard() else index
        for is_by_rows, table, index in zip(by_rows, weight.placements, needed, strict=True)
    ]
    shape = (*indices.shape, weight.shape[1])
    meta = dtensor_specs.TensorMeta(
        torch.Size(shape), torch.empty(shape, device="meta").stride(), weight.dtype
    )
    result: DTensor = dtensor_specs.wrap(found, mesh, placements, meta)
    return result


EMBEDDING_ROWS: dict[str, Rows] = {"aten.embedding_dense_backward.default": backward}
EMBEDDING_WRAPPED = {EMBEDDING: of_own_rows}


def gather(call: Call) -> list[Row]:
    """Over the gathered dimension of the index, and over others in which index and input are of
    one size.
    """
    dim, shape, picked = _dim(call), call.args["self"].shape, call.args["index"].shape
    if not shape or len(shape) != len(picked):
        return []
    rows = [
        call.row([Shard(dim)], index=Shard(dim)),
        call.row([P], self=P),
    ]
    rows += [
        call.row([Shard(d)], self=Shard(d), index=Shard(d))
        for d in range(len(shape))
        if d != dim and shape[d] == picked[d]
    ]
    return rows


def scatter(call: Call) -> list[Row]:
    """Over dimensions that are not scattered along and in which all tensors are of one size."""
    dim, shape = _dim(call), call.args["self"].shape
    return [
        tuple([Shard(d)] * (call.results + len(call.tensors)))
        for d in range(len(shape))
        if d != dim
        and all(len(m.shape) == len(shape) and m.shape[d] == shape[d] for m in call.tensors)
    ]


def scatter_add(call: Call) -> list[Row]:
    """As ``scatter``; sums may be pending in what is added and in what it is added to."""
    return [*scatter(call), call.row([P], self=P, src=P)]


def _dim(call: Call) -> int:
    return int(call.args["dim"]) % max(call.ndim("self"), 1)


def search(call: Call) -> list[Row]:
    """Shard the values on any dimension where one sorted sequence serves all of them.

    Otherwise shard values and sequences equally, on the leading dimensions.
    """
    ndim = call.ndim("self")
    if call.ndim("sorted_sequence") == 1:
        return [call.row([Shard(d)], self=Shard(d)) for d in range(ndim)]
    return [tuple([Shard(d)] * (1 + len(call.tensors))) for d in range(ndim - 1)]


def membership(call: Call) -> list[Row]:
    """Each element on its own among all test elements."""
    return [call.row([Shard(d)], elements=Shard(d)) for d in range(call.ndim("elements"))]


def distances(call: Call) -> list[Row]:
    """Shard the rows of one side, with all of the other; or shard the batches of both equally."""
    first, second = call.args["x1"].shape, call.args["x2"].shape
    ndim = max(len(first), len(second))
    rows = [
        call.row([Shard(ndim - 2)], x1=Shard(len(first) - 2)),
        call.row([Shard(ndim - 1)], x2=Shard(len(second) - 2)),
    ]
    if len(first) == len(second):
        rows += [
            call.row([Shard(d)], x1=Shard(d), x2=Shard(d))
            for d in range(ndim - 2)
            if first[d] == second[d]
        ]
    return rows


def running_extreme(call: Call) -> list[Row]:
    """Values and indices of a running maximum or minimum, over dimensions it does not run along."""
    return [
        call.row([Shard(d), Shard(d)], self=Shard(d))
        for d in range(call.ndim("self"))
        if d != _dim(call)
    ]


def embedding_bag(call: Call) -> list[Row]:
    """Columns of the table; which rows make up which bag is the same for all of them."""
    # Only the maximum keeps indices for each column; of sums and means this result is empty.
    by_column = Shard(1) if call.args["mode"] == _MAX else R
    return [call.row([Shard(1), R, R, by_column], weight=Shard(1))]


def embedding_bag_backward(call: Call) -> list[Row]:
    """Columns of the gradient."""
    if call.args["mode"] == _MAX:
        return [call.row([Shard(1)], grad=Shard(1), maximum_indices=Shard(1))]
    return [call.row([Shard(1)], grad=Shard(1)), call.row([P], grad=P)]


_MAX = 2  # torch.nn.functional.embedding_bag: sum, mean, max


# These hold for whatever part of the other dimensions a rank has, and for none.
BESIDE: dict[str, Rows] = {
    "aten.scatter.src": scatter,
    "aten.scatter.value": scatter,
    "aten.scatter.reduce": scatter,
    "aten.scatter.value_reduce": scatter,
    "aten.scatter_reduce.two": scatter,
    "aten.scatter_add.default": scatter_add,
    "aten.cummax.default": running_extreme,
    "aten.cummin.default": running_extreme,
}
INDEXING_ROWS: dict[str, Rows] = {
    "aten.searchsorted.Tensor": search,
    "aten.isin.Tensor_Tensor": membership,
    "aten._cdist_forward.default": distances,
    "aten._embedding_bag.default": embedding_bag,
    "aten._embedding_bag_forward_only.default": embedding_bag,
    "aten._embedding_bag_dense_backward.default": embedding_bag_backward,
}


GATHER = "aten.gather.default"


def of_own_part(upstream: dtensor_dispatch.Strategy) -> dtensor_dispatch.Strategy:
    """Replace torch's strategy by ``indexing.gather``, unless each rank needs only its own part."""
    decide = strategy(gather, any_part=True)

    def by_layout(schema: dtensor_specs.OpSchema) -> object:
        self, dim, index = schema.args_schema[:3]
        if split_along(self, dim, index) is not None:
            raise Decompose(run)
        return decide(schema)

    return by_layout


def split_along(self: Any, dim: Any, index: Any) -> int | None:
    """The mesh dimension along which alone ranks have other parts to pick from, and pick one
    from all.
    """
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
        # Index and input then have the same part of each other dimension on every rank.
        p == q and (p.is_replicate() or (type(p) is Shard and shape[p.dim] == picked[p.dim]))
        for p, q in beside
    ]
    return found[0] if all(alike) and not of_index.placements[found[0]].is_partial() else None


def run(self: DTensor, dim: int, index: DTensor, *, sparse_grad: bool = False) -> DTensor:
    """``torch.gather`` where ``split_along`` gives a mesh dimension."""
    mesh, dim = self.device_mesh, dim % self.ndim
    at = self.placements.index(Shard(dim))
    kept = [*index.placements]
    # Every rank along this mesh dimension looks for all indices, and one of them finds each.
    kept[at] = Replicate()
    everyones = index.redistribute(placements=kept)._local_tensor
    own, elsewhere = dtensor_specs.own_part_of_index(everyones, mesh, at, self.shape, dim)
    picked = torch.gather(self._local_tensor, dim, own)
    result_placements = [*kept]
    result_placements[at] = P
    meta = dtensor_specs.TensorMeta(
        index.shape, torch.empty(index.shape, device="meta").stride(), self.dtype
    )
    found: DTensor = dtensor_specs.wrap(
        picked.masked_fill(elsewhere, 0), mesh, result_placements, meta
    )
    return found


MASKED_GATHER_WRAPPED = {GATHER: of_own_part}
