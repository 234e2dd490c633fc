"""Tables of embeddings whose rows are sharded

A lookup is pending as a masked sum.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from comparison.row import ids, laid_out, row
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def _ids(mesh, *values):
    return distribute_tensor(ids(*values), mesh, [Replicate()])


@row()
def embedding_returned(mesh, rank):
    """Lookup in sharded rows, returned as it is."""
    return lambda i, w: F.embedding(i, w), (
        _ids(mesh, 0, 5, 7, 2),
        laid_out(mesh, [Shard(0)], 8, 4),
    )


@row()
def embedding_scaled_and_returned(mesh, rank):
    """The pending lookup times a number, returned."""
    return lambda i, w: F.embedding(i, w) * 2, (
        _ids(mesh, 0, 5, 7),
        laid_out(mesh, [Shard(0)], 8, 4),
    )


@row()
def embedding_reduced(mesh, rank):
    """Lookup, made a replica inside."""
    return (
        lambda i, w: F.embedding(i, w).redistribute(placements=[Replicate()]).sin(),
        (_ids(mesh, 0, 5, 7, 2), laid_out(mesh, [Shard(0)], 8, 4)),
    )


@row()
def embedding_scattered(mesh, rank):
    """Lookup, reduced and scattered inside."""
    return (
        lambda i, w: F.embedding(i, w).redistribute(placements=[Shard(0)]).sin(),
        (_ids(mesh, 0, 5, 7, 2), laid_out(mesh, [Shard(0)], 8, 4)),
    )


@row()
def embeddings_pending_at_once(mesh, rank):
    """Two lookups in two tables of equal sizes, added while both are pending."""
    w, v = (laid_out(mesh, [Shard(0)], 8, 4, seed=s) for s in (1, 2))
    return lambda i, w, v: (F.embedding(i, w) + F.embedding(i, v)).sin(), (
        _ids(mesh, 0, 5, 7),
        w,
        v,
    )


@row()
def embeddings_of_unlike_tables(mesh, rank):
    """Two lookups in tables of other lengths, added while both are pending."""
    w, v = laid_out(mesh, [Shard(0)], 8, 4), laid_out(mesh, [Shard(0)], 12, 4, seed=1)
    return lambda i, w, v: (F.embedding(i, w) + F.embedding(i, v)).sin(), (
        _ids(mesh, 0, 5, 7),
        w,
        v,
    )


@row()
def embeddings_reduced_in_reverse(mesh, rank):
    """Two lookups by other indices, reduced in the reverse order."""

    def f(i, j, w):
        a, b = F.embedding(i, w), F.embedding(j, w)
        b = b.redistribute(placements=[Replicate()])
        return a.redistribute(placements=[Replicate()]) * b

    return f, (_ids(mesh, 0, 5, 7), _ids(mesh, 6, 1, 2), laid_out(mesh, [Shard(0)], 8, 4))


@row()
def embedding_reduced_twice(mesh, rank):
    """One lookup, reduced to replicas and to shards."""

    def f(i, w):
        a = F.embedding(i, w)
        one, other = a.redistribute(placements=[Replicate()]), a.redistribute(placements=[Shard(0)])
        return one.sin(), other.cos()

    return f, (_ids(mesh, 0, 5, 7, 2), laid_out(mesh, [Shard(0)], 8, 4))


@row()
def embedding_as_full_tensor_twice(mesh, rank):
    """One lookup, asked for its full tensor two times."""

    def f(i, w):
        a = F.embedding(i, w)
        return a.full_tensor() * a.full_tensor()

    return f, (_ids(mesh, 0, 5, 7, 2), laid_out(mesh, [Shard(0)], 8, 4))


@row(truth="plugin")
def embedding_local_part(mesh, rank):
    """This rank's summand of a lookup, summed by hand."""

    def f(i, w):
        return funcol.all_reduce(F.embedding(i, w).to_local(), "sum", mesh.get_group())

    return f, (_ids(mesh, 0, 5, 7, 2), laid_out(mesh, [Shard(0)], 8, 4, grad=False))


@row()
def embedding_pending_from_outside(mesh, rank):
    """A lookup of eager mode, reduced inside."""
    a = F.embedding(_ids(mesh, 0, 5, 7, 2), laid_out(mesh, [Shard(0)], 8, 4, grad=False))
    return lambda a: a.redistribute(placements=[Replicate()]).sin(), (a,)


@row()
def embedding_in_uneven_rows(mesh, rank):
    """Rows that do not divide by the ranks."""
    return (
        lambda i, w: F.embedding(i, w).redistribute(placements=[Replicate()]).sin(),
        (_ids(mesh, 0, 5, 8, 2), laid_out(mesh, [Shard(0)], 9, 4)),
    )


@row(4)
def embedding_on_four_ranks(mesh, rank):
    """Ten rows on four ranks, returned pending beside its sum."""

    def f(i, w):
        a = F.embedding(i, w)
        return a, a.redistribute(placements=[Replicate()]).sin()

    return f, (_ids(mesh, 0, 5, 9, 2), laid_out(mesh, [Shard(0)], 10, 4))


@row()
def embedding_with_padding(mesh, rank):
    """A row that gets no gradient."""
    return (
        lambda i, w: F.embedding(i, w, padding_idx=5).redistribute(placements=[Replicate()]).sin(),
        (_ids(mesh, 0, 5, 7, 2), laid_out(mesh, [Shard(0)], 8, 4)),
    )


@row()
def gathered_labels_returned(mesh, rank):
    """``gather`` along the sharded dimension, returned pending, two at once."""

    def f(x, i):
        return x.gather(1, i), x.sin().gather(1, i) + x.gather(1, i)

    i = distribute_tensor(torch.tensor([[1], [5], [7], [0]]), mesh, [Replicate()])
    return f, (laid_out(mesh, [Shard(1)], 4, 8), i)


@row()
def embedding_module_rowwise(mesh, rank):
    """A model with an embedding under ``RowwiseParallel`` and a head, on plain ids."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 6))
    plan = {"0": RowwiseParallel(input_layouts=Replicate()), "1": ColwiseParallel()}
    return parallelize_module(model, mesh, plan), (ids(1, 4, 7),)


@row()
def embedding_two_calls_of_a_module(mesh, rank):
    """One embedding module called for tokens and for positions, summed."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.tokens, self.places = nn.Embedding(8, 4), nn.Embedding(10, 4)

        def forward(self, i, j):
            return (self.tokens(i) + self.tokens(j)) * self.places(i)

    plan = {name: RowwiseParallel(input_layouts=Replicate()) for name in ("tokens", "places")}
    return parallelize_module(Net(), mesh, plan), (ids(1, 4, 7), ids(2, 0, 6))


@row()
def embedding_bag_in_sharded_rows(mesh, rank):
    """``embedding_bag`` of a table whose rows are sharded."""
    return (
        lambda i, w: F.embedding_bag(i.view(2, 2), w, mode="mean"),
        (_ids(mesh, 0, 5, 7, 2), laid_out(mesh, [Shard(0)], 8, 4)),
    )


@row()
def embedding_tied_to_the_head(mesh, rank):
    """A sharded table as embedding and as head."""
    return (
        lambda i, w: F.embedding(i, w).redistribute(placements=[Replicate()]) @ w.t(),
        (_ids(mesh, 0, 5, 7, 2), laid_out(mesh, [Shard(0)], 8, 4)),
    )


@row()
def embedding_by_sharded_ids(mesh, rank):
    """Ids sharded as the table is."""
    i = distribute_tensor(ids(0, 5, 7, 2), mesh, [Shard(0)])
    return lambda i, w: F.embedding(i, w).sin(), (i, laid_out(mesh, [Shard(0)], 8, 4))


@row(2, 2)
def embedding_on_a_grid(mesh, rank):
    """Ids sharded over one mesh dimension, rows over the other; two pending."""
    i = distribute_tensor(ids(0, 5, 7, 2), mesh, [Shard(0), Replicate()])
    w, v = (laid_out(mesh, [Replicate(), Shard(0)], 8, 4, seed=s) for s in (1, 2))
    return lambda i, w, v: F.embedding(i, w) + F.embedding(i, v), (i, w, v)


@row()
def embedding_in_uneven_rows_reduced_twice(mesh, rank):
    """Nine rows on two ranks, the lookup reduced to replicas and to columns."""

    def f(i, w):
        a = F.embedding(i, w)
        one, other = (a.redistribute(placements=[p]) for p in (Replicate(), Shard(1)))
        return one.sin(), other.cos()

    return f, (_ids(mesh, 0, 5, 8, 2), laid_out(mesh, [Shard(0)], 9, 4))


@row()
def embedding_returned_and_reduced(mesh, rank):
    """One lookup, returned pending beside its full tensor."""

    def f(i, w):
        a = F.embedding(i, w)
        return a, a.full_tensor().sin()

    return f, (_ids(mesh, 0, 5, 7, 2), laid_out(mesh, [Shard(0)], 8, 4))


@row()
def embeddings_of_unlike_tables_returned(mesh, rank):
    """Lookups in two tables of other lengths, both returned pending."""
    w, v = laid_out(mesh, [Shard(0)], 8, 4), laid_out(mesh, [Shard(0)], 12, 4, seed=1)
    return lambda i, w, v: (F.embedding(i, w) * 2, F.embedding(i, v)), (_ids(mesh, 0, 5, 7), w, v)
