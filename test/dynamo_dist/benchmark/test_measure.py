import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from dynamo_dist.benchmark.measure import launches_counted, peak_memory, step_times
from inductor_passes.testing import fake_group

CPU = torch.device("cpu")


def test_times_are_milliseconds_of_each_step():
    times = step_times(lambda: time.sleep(0.01), 3, CPU)
    assert len(times) == 3 and all(9.9 < t < 200 for t in times)


def functional(x):
    group = dist.group.WORLD
    y = funcol.all_reduce(x, "sum", group)
    z = funcol.all_gather_tensor(y, 0, group)
    return funcol.reduce_scatter_tensor(z, "sum", 0, group) + 0


def in_place(x):
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.all_gather([torch.empty_like(x) for _ in range(2)], x)
    dist.all_to_all_single(torch.empty_like(x), x)


@pytest.mark.parametrize(
    ("fn", "launches"),
    [
        (functional, {"all_reduce": 1, "all_gather": 1, "reduce_scatter": 1}),
        (in_place, {"all_reduce": 1, "broadcast": 1, "all_gather": 1, "all_to_all": 1}),
        (lambda x: x + 1, {}),
    ],
)
def test_launches_are_counted_by_kind(fn, launches):
    with fake_group(world_size=2), launches_counted() as counts:
        fn(torch.ones(4))
    assert dict(counts) == launches


def test_peak_memory_sees_what_was_freed_in_between():
    with peak_memory(CPU) as idle:
        pass
    with peak_memory(CPU) as busy:
        torch.ones(64 << 20, dtype=torch.uint8).sum()
    assert busy.source.startswith("process RSS, peak")
    if idle.source == "process RSS, peak":
        assert busy.bytes > idle.bytes + (32 << 20)
