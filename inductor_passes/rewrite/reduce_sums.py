"""Reduce a sum of tensors once, in place of each of them.

Tensor parallelism shows it in each backward: the gradient of a block's input is the sum of what
several matrix products return, and autograd reduces each of them on its own.
"""

from __future__ import annotations

import torch
from torch import fx

from inductor_passes.graph.collectives import (
    is_wait,
    launch_of,
    payload_bytes,
    reduce_op,
    waits_of,
)
from inductor_passes.graph.edit import aten, emit, replace, tensor
from inductor_passes.graph_pass import Numerics, PassStats, Rewrite

c10d = torch.ops._c10d_functional
_LINEAR = ("sum", "avg")


class ReduceSums(Rewrite):
    """Add the payloads of all_reduces whose results are only added, and reduce the sum.

    Two of them become one: half the starts, half the bytes, and no more memory. Three or more, as
    of a query, key and value, become one likewise. The one stands where the last of them stood.

    Requires: a functional graph.
    Ensures:  the same sums, in another order; a second run changes nothing.
    Stats:    ``all_reduces_removed``, ``bytes_saved`` (payload of this rank).
    """

    name = "reduce_sums"
    numerics = Numerics.REASSOCIATING
    # The one keeps the number of the last alone: a rank that launches the others too sees that the
    # plan leaves them out.
    shows_in_plan = True

    def run(self, graph: fx.Graph) -> PassStats:
        count = saved = 0
        position = {node: i for i, node in enumerate(graph.nodes)}
        for node in graph.find_nodes(op="call_function", target=aten.add.Tensor, sort=True):
            terms = _terms(node)
            if terms is None:
                continue
            first, last = sorted(terms, key=position.__getitem__)
            with graph.inserting_before(last):
                payloads = tuple(term.args[0] for term in terms)
                payload = emit(graph, aten.add.Tensor, payloads, node)
                launch = emit(graph, last.target, (payload, *last.args[1:]), last)
            position[launch] = position[last]
            with graph.inserting_before(node):
                wait = emit(graph, c10d.wait_tensor.default, (launch,), node)
            position[wait] = position[node]
            replace(node, wait, self.name)
            graph.erase_node(node)
            saved += payload_bytes(first)
            for term in (first, last):
                graph.erase_node(waits_of(term)[0])
                graph.erase_node(term)
            count += 1
        return PassStats(count > 0, {"all_reduces_removed": count, "bytes_saved": saved})


def _terms(add: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the two all_reduces whose results ``add`` alone reads, if they reduce alike."""
    if len(add.args) != 2 or add.kwargs or add.args[0] is add.args[1]:
        return None
    one, other = (_reduced(term) for term in add.args)
    if one is None or other is None or one.args[1:] != other.args[1:]:
        return None
    a, b = tensor(one), tensor(other)
    if a is None or b is None or a.dtype != b.dtype:
        return None
    # By their text: comparing symbols with ``==`` would add a guard to the graph.
    return (one, other) if str(a.shape) == str(b.shape) else None


def _reduced(value: object) -> fx.Node | None:
    """Return the all_reduce whose result ``value`` is, if one node alone reads it."""
    if not isinstance(value, fx.Node) or not is_wait(value) or len(value.users) != 1:
        return None
    launch = launch_of(value)
    if launch is None or launch.target is not c10d.all_reduce.default or len(launch.users) != 1:
        return None
    return launch if reduce_op(launch) in _LINEAR else None
