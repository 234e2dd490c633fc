"""Random programs, scheduled: every rank's numbers stay, and so does everything that must."""

import random

import pytest
import torch
from programs import RANKS, wait

from inductor_passes.pipeline import run_pass
from inductor_passes.schedule.schedule_pass import ScheduleGraph
from inductor_passes.simulate import simulate
from inductor_passes.testing import FixedCost, fake_group, run_on_ranks, trace

c10d = torch.ops._c10d_functional
N = 8


class PerByte(FixedCost):
    """Starts cost much, bytes little: buckets pay."""

    def link_us(self, launch, payload_bytes):
        return sum(self._launch + payload / 1000 for payload in payload_bytes)

    def launch_us(self, launch):
        return self.link_us(launch, [N * N * 4])


COSTS = [
    FixedCost(launch=8, mm=10, tanh=1),
    FixedCost(launch=50, mm=10, tanh=1),
    PerByte(launch=20, mm=5, tanh=1),
]


def program(seed):
    """Products, casts, every collective on two groups, and now and then a write to an input."""

    def run(*inputs):
        choose = random.Random(seed)
        pool = list(inputs)
        for _ in range(choose.randint(10, 30)):
            x, y = choose.choice(pool), choose.choice(pool)
            rows = [N // RANKS] * RANKS
            kind = choose.randrange(8)
            if kind == 0:
                new = torch.tanh(x @ y)
            elif kind == 1:
                new = torch.tanh(x + 1)
            elif kind == 2:
                part = torch.tanh(x)[: N // RANKS]
                new = wait(c10d.all_gather_into_tensor(part.contiguous(), RANKS, "0"))
            elif kind == 3:
                part = wait(c10d.reduce_scatter_tensor(x.clone(), "sum", RANKS, "0"))
                new = torch.tanh(part.repeat(RANKS, 1))
            elif kind == 4:
                new = torch.tanh(wait(c10d.all_reduce(x, "sum", "0")))
            elif kind == 5:
                new = wait(c10d.all_to_all_single(x.clone(), rows, rows, "0"))
            elif kind == 6:
                both = c10d.all_reduce_coalesced([x, y], "sum", "0")
                new = torch.tanh(wait(both[0]) - wait(both[1]))
            else:
                target = choose.choice(inputs)
                target.copy_(torch.tanh(y))
                new = target + 1
            pool.append(new)
        return pool[-6:]

    return run


@pytest.mark.parametrize("seed", range(12))
def test_numbers_stay(seed):
    shapes = [[N, N]] * 4
    with fake_group(RANKS):
        graph = trace(program(seed), *shapes)

        def inputs():
            torch.manual_seed(seed)
            return [[torch.randn(*shape) for _ in range(RANKS)] for shape in shapes]

        before = run_on_ranks(graph, *inputs())
        cost = COSTS[seed % len(COSTS)]
        makespan = simulate(graph, cost).makespan_us
        run_pass(ScheduleGraph(cost), graph)
        after = run_on_ranks(graph, *inputs())
        assert simulate(graph, cost).makespan_us <= makespan + 1e-6
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old, new, strict=True))
