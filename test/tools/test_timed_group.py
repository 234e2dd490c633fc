import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))
from timed_group import ThreadClock, WallClock, link_time, timed_group

c10d = torch.ops._c10d_functional
MS = 1000.0


def fixed(us):
    return lambda kind, payloads, ranks: us


def seconds(clock, *calls, groups=("0",)):
    """Seconds until all are launched, and until all have been waited for."""
    start = clock.now()
    launched = [call(group) for call in calls for group in groups]
    started = clock.now() - start
    for tensor in launched:
        c10d.wait_tensor(tensor)
    return started, clock.now() - start


def gather(group):
    return c10d.all_gather_into_tensor(torch.ones(4), 8, group)


@pytest.mark.parametrize(
    "call",
    [
        gather,
        lambda g: c10d.reduce_scatter_tensor(torch.ones(8), "sum", 8, g),
        lambda g: c10d.all_reduce(torch.ones(4), "sum", g),
        lambda g: c10d.all_to_all_single(torch.ones(8), [1] * 8, [1] * 8, g),
        lambda g: c10d.all_gather_into_tensor_coalesced([torch.ones(4)], 8, g)[0],
        lambda g: c10d.reduce_scatter_tensor_coalesced([torch.ones(8)], "sum", 8, g)[0],
    ],
)
def test_a_collective_ends_when_the_link_is_done(call):
    with timed_group(8, fixed(0.0), clock=ThreadClock()) as clock:
        seconds(clock, call)  # the first call loads code
        with link_time(fixed(30 * MS)):
            started, ended = seconds(clock, call)
    assert started < 0.03 <= ended


def test_a_group_is_one_channel_and_groups_are_several():
    with timed_group(8, fixed(0.0), clock=ThreadClock()) as clock:
        mesh = init_device_mesh("cpu", (4, 2))
        names = [mesh.get_group(i).group_name for i in range(2)]
        seconds(clock, gather)
        with link_time(fixed(40 * MS)):
            _, queued = seconds(clock, gather, gather)
            _, apart = seconds(clock, gather, groups=names)
    assert 0.04 <= apart < 0.08 <= queued


def test_the_link_is_told_what_it_carries():
    seen = []

    def link(kind, payloads, ranks):
        seen.append((kind, list(payloads), len(ranks)))
        return 0.0

    with timed_group(8, link):
        c10d.wait_tensor(gather("0"))
        for tensor in c10d.all_gather_into_tensor_coalesced([torch.ones(4), torch.ones(2)], 8, "0"):
            c10d.wait_tensor(tensor)
    assert seen == [("all_gather", [16], 8), ("all_gather", [16, 8], 8)]


def test_waiting_burns_no_cpu():
    with timed_group(2, fixed(100 * MS)):
        before, wall = time.thread_time(), WallClock()
        _, ended = seconds(wall, lambda g: c10d.all_reduce(torch.ones(4), "sum", g))
        assert ended >= 0.1 and time.thread_time() - before < 0.05


def test_it_owns_the_default_group():
    with timed_group(2, fixed(0.0)), pytest.raises(RuntimeError, match="destroy_process_group"):
        with timed_group(2, fixed(0.0)):
            pass
    assert not dist.is_initialized()


def test_a_threads_clock_counts_its_work_and_its_waits():
    with timed_group(2, fixed(50 * MS), clock=ThreadClock()) as clock:
        start = clock.now()
        seconds(clock, lambda g: c10d.all_reduce(torch.ones(4), "sum", g))
        time.sleep(0.1)  # counts for nothing
        assert 0.05 <= clock.now() - start < 0.1
