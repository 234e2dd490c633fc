"""Gathers, scatters, searches and distances."""

from __future__ import annotations

from torch.distributed.tensor import Shard

from dynamo_dist.sharding.rows import Call, P, R, Row, Rows


def gather(call: Call) -> list[Row]:
    """Over the gathered dimension of the index, and over others in which index and input are of one size."""
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
    """Values over any dimension in one sorted sequence; values and sequences alike over leading ones."""
    ndim = call.ndim("self")
    if call.ndim("sorted_sequence") == 1:
        return [call.row([Shard(d)], self=Shard(d)) for d in range(ndim)]
    return [tuple([Shard(d)] * (1 + len(call.tensors))) for d in range(ndim - 1)]


def membership(call: Call) -> list[Row]:
    """Each element on its own among all test elements."""
    return [call.row([Shard(d)], elements=Shard(d)) for d in range(call.ndim("elements"))]


def distances(call: Call) -> list[Row]:
    """Rows of one side against all of the other; batches alike."""
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
