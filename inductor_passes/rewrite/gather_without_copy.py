"""A gather along an inner dimension without the copies around it."""

from __future__ import annotations

import torch
from torch import fx

from inductor_passes.base import Numerics, PassStats
from inductor_passes.graph.collectives import (
    group_size,
    launches,
    output_bytes,
    payload_bytes,
    waits_of,
)
from inductor_passes.graph.edit import (
    aten,
    chain_above,
    emit,
    erase_unused,
    replace,
    static_shape,
    tensor,
)
from inductor_passes.rewrite.base import Rewrite
from inductor_passes.rewrite.layout import CONTIGUOUS, gathered, join_at, joins_as_view

c10d = torch.ops._c10d_functional
_TURNING = frozenset({aten.permute.default, aten.t.default, aten.transpose.int})
# Readers to whom strides make no difference.
_ANY_STRIDE = frozenset(
    {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, *_TURNING}
)


class GatherWithoutCopy(Rewrite):
    """The pieces of a gather along an inner dimension are put together by index, not by a ``cat``.

    Where the shard is a transposed tensor whose first dimension is the gathered one (a weight held as
    its transpose), the tensor itself is gathered and transposed after: neither side copies. Elsewhere
    the pieces are read through a permutation, which Inductor fuses into pointwise readers; a ``cat``
    is a kernel of its own. With nothing but ones in front of the dimension it is a view.

    Requires: a functional graph; static shapes.
    Ensures:  the gathered values bit by bit; a matrix product that reads them in another layout may add
              in another order. A second run changes nothing.
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
    """The tensor of which ``shard`` is a permutation that puts its first dimension at ``dim``, and the order."""
    while isinstance(shard, fx.Node) and shard.target is aten.clone.default:
        shard = shard.args[0]
    if not isinstance(shard, fx.Node) or shard.target not in _TURNING:
        return None
    source, value = shard.args[0], tensor(shard)
    assert isinstance(source, fx.Node) and value is not None
    order = _order(shard, value.dim())
    return (source, order) if order[dim] == 0 else None


def _order(node: fx.Node, rank: int) -> list[int]:
    """Tell which dimension of the input each dimension of a transposed tensor is."""
    if node.target is aten.permute.default:
        return [int(i) % rank for i in node.args[1]]  # type: ignore[union-attr, arg-type]
    a, b = (0, 1) if node.target is aten.t.default else node.args[1:3]
    order = list(range(rank))
    i, j = order[a], order[b]  # type: ignore[index]
    order[i], order[j] = j, i
    return order
