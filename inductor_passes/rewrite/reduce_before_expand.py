"""Reduce what is there once, and repeat the sum."""

from __future__ import annotations

import math

import torch
from torch import fx

from inductor_passes.base import Numerics, PassStats
from inductor_passes.graph.collectives import launches, output_bytes, waits_of
from inductor_passes.graph.edit import (
    again,
    aten,
    chain_above,
    emit,
    erase_unused,
    replace,
    static_shape,
    tensor,
)
from inductor_passes.rewrite.base import Rewrite

c10d = torch.ops._c10d_functional


class ReduceBeforeExpand(Rewrite):
    """All-reduce the value before it is expanded, and expand the sum.

    Requires: a functional graph; static shapes.
    Ensures:  the same sums, perhaps added in another order, because a ring cuts the payload elsewhere; a
              second run changes nothing.
    Stats:    ``launches_shrunk``, ``bytes_saved`` (payload of this rank).
    """

    name = "reduce_before_expand"
    numerics = Numerics.REASSOCIATING

    def run(self, graph: fx.Graph) -> PassStats:
        count = saved = 0
        for launch in launches(graph):
            if launch.target is not c10d.all_reduce.default:
                continue
            chain = chain_above(launch.args[0])
            shapes = [static_shape(node) for node in chain]
            if not chain or any(shape is None for shape in shapes):
                continue
            sizes = [math.prod(shape) for shape in shapes if shape is not None]
            at = sizes.index(min(sizes))
            if sizes[at] == sizes[0]:
                continue
            source = chain[at]
            with graph.inserting_before(launch):
                reduced = emit(graph, c10d.all_reduce.default, (source, *launch.args[1:]), launch)
            for wait in waits_of(launch):
                with graph.inserting_before(wait):
                    arrived = emit(graph, c10d.wait_tensor.default, (reduced,), wait)
                    result = again(graph, chain[:at], arrived)
                    # An expanded value shares memory among its elements: what views or writes it may not.
                    if not _has_layout_of(wait, result):
                        dense = {"memory_format": torch.contiguous_format}
                        result = emit(graph, aten.clone.default, (result,), wait, dense)
                replace(wait, result, self.name)
                graph.erase_node(wait)
            saved += output_bytes(chain[0]) - output_bytes(source)
            count += 1
            erase_unused(graph, [launch, chain[0]])
        return PassStats(count > 0, {"launches_shrunk": count, "bytes_saved": saved})


def _has_layout_of(old: fx.Node, new: fx.Node) -> bool:
    was, now = tensor(old), tensor(new)
    return was is not None and now is not None and was.stride() == now.stride()
