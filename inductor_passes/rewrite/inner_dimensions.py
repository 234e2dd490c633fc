"""Move chunks of a dimension that is not the first without the copies around collectives."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from inductor_passes.cost import CostModel
from inductor_passes.cost.machine import Machine
from inductor_passes.cost.model import machine_of
from inductor_passes.graph.collectives import (
    group_size,
    launches,
    output_bytes,
    payload_bytes,
    reduce_op,
    waits_of,
)
from inductor_passes.graph.edit import (
    aten,
    chain_above,
    emit,
    erase_unused,
    permutation,
    replace,
    static_shape,
    tensor,
)
from inductor_passes.graph_pass import Numerics, PassContext, PassStats, Rewrite

CONTIGUOUS = {"memory_format": torch.contiguous_format}


@dataclass(frozen=True, slots=True)
class Gathered:
    """``node`` holds what ``wait`` brought, joined along ``dim``; ``between`` are the nodes that
    joined it.
    """

    node: fx.Node
    dim: int
    between: tuple[fx.Node, ...] = ()


def gathered(wait: fx.Node, count: int) -> Gathered:
    """Return the value that an all_gather over ``count`` ranks brought: joined by a split and a
    cat, or as it came.
    """
    shape = static_shape(wait)
    users = list(wait.users)
    plain = Gathered(wait, 0)
    if shape is None or len(users) != 1 or users[0].target is not aten.split.Tensor:
        return plain
    split = users[0]
    # Only the split that undoes the gather, one piece a rank, along the dimension in which ranks
    # were stacked.
    if (len(split.args) > 2 and split.args[2] != 0) or split.args[1] != shape[0] // count:
        return plain
    pieces = sorted(split.users, key=lambda n: n.args[1] if isinstance(n.args[1], int) else -1)
    if [p.args[1] for p in pieces] != list(range(count)):
        return plain
    joins = {user for piece in pieces for user in piece.users}
    if len(joins) != 1 or any(p.target is not operator.getitem for p in pieces):
        return plain
    cat = joins.pop()
    # In another order, or with other pieces between them, it is no gather along a dimension.
    if cat.target is not aten.cat.default or cat.args[0] != pieces:
        return plain
    dim = cat.args[1] if len(cat.args) > 1 else 0
    assert isinstance(dim, int)
    return Gathered(cat, dim % len(shape), (split, *pieces))


def cut_first(graph: fx.Graph, node: fx.Node, dim: int, count: int, like: fx.Node) -> fx.Node:
    """Cut ``dim`` in ``count`` parts and stack them: the first dimension becomes ``count`` times as
    long.

    Local shapes: [a, d, ...] cut along 1 gives [count * a, d / count, ...]. No node for dimension
    0.
    """
    shape = static_shape(node)
    assert shape is not None
    local = (*shape[:dim], shape[dim] // count, *shape[dim + 1 :])
    stacked_shape = [count * local[0], *local[1:]]
    if dim == 0:
        return node
    # With ones in front, memory is in that order already.
    if all(size == 1 for size in shape[:dim]):
        return emit(graph, aten.reshape.default, (node, stacked_shape), like)
    parts = (*shape[:dim], count, shape[dim] // count, *shape[dim + 1 :])
    order = (dim, *(i for i in range(len(parts)) if i != dim))
    stacked = _permuted(graph, node, parts, order, like)
    return emit(graph, aten.view.default, (stacked, stacked_shape), like)


def join_at(graph: fx.Graph, node: fx.Node, dim: int, count: int, like: fx.Node) -> fx.Node:
    """Inverse of ``cut_first``: [count * a, d, ...] joined along 1 gives [a, count * d, ...]."""
    shape = static_shape(node)
    assert shape is not None
    if dim == 0:
        return node
    local = (shape[0] // count, *shape[1:])
    whole = [*local[:dim], count * local[dim], *local[dim + 1 :]]
    if joins_as_view(shape, dim, count):
        return emit(graph, aten.reshape.default, (node, whole), like)
    order = (*range(1, dim + 1), 0, *range(dim + 1, len(shape) + 1))
    joined = _permuted(graph, node, (count, *local), order, like)
    return emit(graph, aten.view.default, (joined, whole), like)


def joins_as_view(shape: Sequence[int], dim: int, count: int) -> bool:
    """Return whether what came as ``shape`` is joined along ``dim`` as it lies: only ones stand
    before ``dim``.
    """
    return shape[0] == count and all(size == 1 for size in shape[1:dim])


def _permuted(
    graph: fx.Graph, node: fx.Node, shape: Sequence[int], order: Sequence[int], like: fx.Node
) -> fx.Node:
    """A contiguous permutation of ``node`` seen as ``shape``: one copy at most, which may fuse."""
    seen = emit(graph, aten.reshape.default, (node, list(shape)), like)
    turned = emit(graph, aten.permute.default, (seen, list(order)), like)
    return emit(graph, aten.clone.default, (turned,), like, CONTIGUOUS)


c10d = torch.ops._c10d_functional
_TURNING = frozenset({aten.permute.default, aten.t.default, aten.transpose.int})
# Readers to whom strides make no difference.
_ANY_STRIDE = frozenset(
    {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, *_TURNING}
)


class GatherWithoutCopy(Rewrite):
    """Join the chunks of a gather along an inner dimension by index, not by a ``cat``.

    Where the shard is a transposed tensor whose first dimension is the gathered one (a weight held
    as its transpose), the tensor itself is gathered and transposed after: neither side copies.
    Elsewhere the pieces are read through a permutation, which Inductor fuses into pointwise
    readers; a ``cat`` is a kernel of its own. With nothing but ones in front of the dimension it is
    a view.

    Requires: a functional graph; static shapes.
    Ensures:  the gathered values bit by bit; a matrix product that reads them in another layout may
              add in another order. A second run changes nothing.
    Stats:    ``copies_removed``, ``bytes_saved`` (written to memory by copies that are gone).
    """

    name = "gather_without_copy"
    numerics = Numerics.REASSOCIATING

    def run(self, graph: fx.Graph) -> PassStats:
        count = saved = 0
        for launch in launches(graph):
            waits, ranks = waits_of(launch), group_size(launch)
            if launch.target is not c10d.all_gather_into_tensor.default or len(waits) != 1:
                continue
            whole = gathered(waits[0], ranks)
            came = static_shape(waits[0])
            if whole.node is waits[0] or came is None:
                continue
            count += 1
            turned = _turned(launch.args[0], whole.dim)
            with graph.inserting_before(whole.node):
                if turned is None:
                    result = join_at(graph, waits[0], whole.dim, ranks, whole.node)
                    if joins_as_view(came, whole.dim, ranks):
                        saved += output_bytes(launch)
                else:
                    straight, order = turned
                    saved += payload_bytes(launch) + output_bytes(launch)
                    with graph.inserting_before(launch):
                        moved = emit(graph, launch.target, (straight, *launch.args[1:]), launch)
                    with graph.inserting_before(waits[0]):
                        arrived = emit(graph, c10d.wait_tensor.default, (moved,), waits[0])
                    result = emit(graph, aten.permute.default, (arrived, order), whole.node)
                    # A reader that was traced for contiguous rows would compute with other strides:
                    # copy once where the value is whole.
                    if not all(user.target in _ANY_STRIDE for user in whole.node.users):
                        saved -= output_bytes(launch)
                        result = emit(graph, aten.clone.default, (result,), whole.node, CONTIGUOUS)
            replace(whole.node, result, self.name)
            erase_unused(graph, [whole.node])
            if turned is not None:
                graph.erase_node(waits[0])
                shard = chain_above(launch.args[0])[0]
                graph.erase_node(launch)
                erase_unused(graph, [shard])
        return PassStats(count > 0, {"copies_removed": count, "bytes_saved": saved})


def _turned(shard: object, dim: int) -> tuple[fx.Node, list[int]] | None:
    """Return what ``shard`` permutes to put its first dimension at ``dim``, and the order.

    Clones are looked through. The result is None if ``shard`` is no such permutation.
    """
    while isinstance(shard, fx.Node) and shard.target is aten.clone.default:
        shard = shard.args[0]
    if not isinstance(shard, fx.Node) or shard.target not in _TURNING:
        return None
    source, value = shard.args[0], tensor(shard)
    assert isinstance(source, fx.Node) and value is not None
    order = permutation(shard, value.dim())
    return (source, order) if order[dim] == 0 else None


class ScatterByExchange(Rewrite):
    """Turn a reduce_scatter into an all_to_all and a local sum: half the bytes with gloo.

    Gloo implements a reduce_scatter as an all_reduce, and each rank keeps its chunk. Here each rank
    instead sends every other rank its chunk. Each rank adds what it receives in the order of ranks,
    and Inductor fuses the sum with what reads it. The pass applies only where the topology says
    that a reduce_scatter takes more than one round (``reduce_scatter_rounds``). It must also
    predict a gain with the sum counted.

    Requires: a functional graph; static shapes; sums and averages of floating-point numbers.
    Ensures:  the same sums, perhaps in another order; a second run changes nothing.
    Stats:    ``scatters_replaced``, ``bytes_saved`` (on the link, by this rank).
    """

    name = "scatter_by_exchange"
    numerics = Numerics.REASSOCIATING
    shows_in_plan = True

    def __init__(self, cost: CostModel | None = None) -> None:
        self.cost = cost

    @classmethod
    def build(cls, context: PassContext) -> ScatterByExchange:
        return cls(context.cost)

    def digest(self) -> str:
        return self.cost.digest() if self.cost is not None else ""

    def run(self, graph: fx.Graph) -> PassStats:
        count = saved = 0
        machine = machine_of(self.cost)
        if machine is not None and machine.topology.reduce_scatter_rounds > 1:
            for launch in launches(graph):
                if _is_sum_of_floats(launch) and self._exchange(graph, launch, machine):
                    ranks = group_size(launch)
                    once = payload_bytes(launch) * (ranks - 1) / ranks
                    saved += int(once * (machine.topology.reduce_scatter_rounds - 1))
                    count += 1
                    graph.erase_node(waits_of(launch)[0])
                    graph.erase_node(launch)
        return PassStats(count > 0, {"scatters_replaced": count, "bytes_saved": saved})

    def _exchange(self, graph: fx.Graph, launch: fx.Node, machine: Machine) -> bool:
        """Put the exchange beside ``launch``, for its readers; return whether it is predicted to
        be faster.
        """
        assert self.cost is not None
        source, operation, ranks, group = launch.args
        first, *rest = static_shape(launch) or ()
        with graph.inserting_before(launch):
            args = (source, [first] * ranks, [first] * ranks, group)  # type: ignore[operator]
            sent = emit(graph, c10d.all_to_all_single.default, args, launch)
        own_us = machine.kernel_us(output_bytes(sent) + output_bytes(launch))
        # Emitted first and erased again: the price depends on group and sizes that the node itself
        # has.
        if self.cost.launch_us(sent) + own_us >= self.cost.launch_us(launch):
            graph.erase_node(sent)
            return False
        wait = waits_of(launch)[0]
        with graph.inserting_before(wait):
            arrived = emit(graph, c10d.wait_tensor.default, (sent,), wait)
            parts = emit(graph, aten.view.default, (arrived, [ranks, first, *rest]), wait)
            # Rows arrive in the order of ranks, so every rank adds in one order.
            total = emit(graph, aten.sum.dim_IntList, (parts, [0]), wait)
            if operation == "avg":
                total = emit(graph, aten.div.Tensor, (total, ranks), wait)
        replace(wait, total, self.name)
        return True


def _is_sum_of_floats(launch: fx.Node) -> bool:
    if launch.target is not c10d.reduce_scatter_tensor.default or len(waits_of(launch)) != 1:
        return False
    value, shape = tensor(launch), static_shape(launch)
    if value is None or not shape or not value.dtype.is_floating_point:
        return False
    return group_size(launch) > 1 and reduce_op(launch) in ("sum", "avg") and 0 not in shape
