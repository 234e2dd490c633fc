"""Small graphs that communicate, and a scheduler that merges whatever can be merged."""

import dataclasses
import graphlib

import torch

from inductor_passes.schedule.schedule_pass import ScheduleGraph
from inductor_passes.testing import FixedCost

c10d = torch.ops._c10d_functional
wait = c10d.wait_tensor
RANKS = 4


def gathers(x, *weights):
    """Each layer needs its weight whole."""
    for w in weights:
        x = (x @ wait(c10d.all_gather_into_tensor(w, RANKS, "0"))).relu()
    return x


def every_kind(x, a, b, c):
    """Two of each collective that can be merged; the reductions start from computed values."""
    whole_a = wait(c10d.all_gather_into_tensor(a, RANKS, "0"))
    whole_b = wait(c10d.all_gather_into_tensor(b, RANKS, "0"))
    y = x @ whole_a
    z = y @ whole_b
    parts = [wait(c10d.reduce_scatter_tensor(t, "sum", RANKS, "0")) for t in (y, z)]
    sums = [wait(c10d.all_reduce(t, "sum", "0")) for t in (c, c.sum())]
    rows = [y.shape[0] // RANKS] * RANKS
    swapped = [wait(c10d.all_to_all_single(t, rows, rows, "0")) for t in (y, z)]
    return (*parts, *sums, *swapped)


GATHERS = [[16, 16], *[[4, 16]] * 4]
EVERY_KIND = [[16, 16], [4, 16], [4, 16], [3, 3]]


class CoalescingCost(FixedCost):
    """One call for several launches costs less than one large launch."""

    def link_us(self, launch, payload_bytes):
        return self._launch if len(payload_bytes) > 1 else 2 * self._launch


class MergeAll(ScheduleGraph):
    """Every bucket that the rules allow, in an order that allows them; whatever it costs."""

    def solve(self, problem, *, bucket, **limits):
        members = {}
        for i, node in enumerate(problem.nodes):
            if node.kind == "launch":
                members.setdefault(node.merge_key, []).append(i)
        buckets = [tuple(ids) for ids in members.values() if len(ids) > 1]
        waits = {node.launch: i for i, node in enumerate(problem.nodes) if node.launch is not None}
        block = {i: (i,) for i in range(len(problem.nodes))}
        for ids in buckets:
            block.update(dict.fromkeys(ids, ids))
            landing = tuple(waits[i] for i in ids)
            block.update(dict.fromkeys(landing, landing))
        sorter = graphlib.TopologicalSorter()
        for i, node in enumerate(problem.nodes):
            behind = [*node.deps, *([] if node.launch is None else [node.launch])]
            sorter.add(block[i], *(block[d] for d in behind if block[d] != block[i]))
        order = tuple(i for ids in sorter.static_order() for i in ids)
        sound = super().solve(problem, bucket=False, **limits)
        return dataclasses.replace(
            sound,
            order=order,
            buckets=tuple(buckets),
            makespan_us=1.0,
            original_makespan_us=2.0,
            reasons=(),
        )

    def _pays(self, *_):
        return True
