"""Microseconds of a call, on a CPU or a GPU, the same number on every rank of the job.

How often a call is repeated depends on how long it takes, and so on a clock; ranks that repeated a
collective unequally often would hang. The ranks therefore agree on every count before they use it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

Timed = Callable[[], object]
WARM_UP = 2
LEAST_SAMPLES, MOST_SAMPLES = 5, 60
MOST_CALLS = 200
# More than the second-level cache of any GPU; and writing it takes longer than the host needs for a launch.
FLUSH_BYTES = 1 << 30


class Clock(Protocol):
    """Clock of one kind of device.

    ``sample_us``: a sample repeats a shorter call until it lasts about so long. ``across``: what the ranks of
    a group make of their times of one collective.
    """

    device: torch.device
    sample_us: float
    across: dist.ReduceOp.RedOpType
    how: str

    def sample(self, call: Timed, calls: int) -> float:
        """Microseconds of one of ``calls`` calls in a row, which all ranks start together."""

    def summary(self, samples: Sequence[float]) -> float:
        """The time that counts."""


class CpuClock:
    """Time on the wall. The best sample counts: what else runs on a host only ever adds time."""

    device = torch.device("cpu")
    sample_us = 2000.0
    # A step goes on when its slowest rank does.
    across = dist.ReduceOp.MAX

    def __init__(
        self, summary: Callable[[Sequence[float]], float] = min, how: str = "best"
    ) -> None:
        self._summary, self.how = summary, how

    def sample(self, call: Timed, calls: int) -> float:
        meet(self.device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls * 1e6

    def summary(self, samples: Sequence[float]) -> float:
        return self._summary(samples)


class CudaClock:
    """CUDA events around one call. The median counts.

    Before each sample the cache is flushed; while that runs, the host queues the events and the call between
    them, so that its own pace does not count.
    """

    sample_us = 0.0
    # A rank that comes early waits inside the kernel; no rank takes less than the work.
    across = dist.ReduceOp.MIN
    how = "median"

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self._flush = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device=self.device)

    def sample(self, call: Timed, calls: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        meet(self.device)
        self._flush.zero_()
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / calls * 1e3

    def summary(self, samples: Sequence[float]) -> float:
        return statistics.median(samples)


def typical_us(
    clock: Clock, call: Timed, budget_us: float, group: dist.ProcessGroup | None = None
) -> float:
    """Microseconds of ``call`` on the slowest rank of the job, measured within about ``budget_us``.

    ``group``: the call is a collective on it. At least ``LEAST_SAMPLES`` are taken, however long they take.
    """
    for _ in range(WARM_UP):
        call()
    once = slowest([clock.sample(call, 1)], clock.device)[0]
    calls = min(max(int(clock.sample_us / once), 1), MOST_CALLS)
    fitting = int(budget_us / (once * calls))
    samples = min(max(fitting, LEAST_SAMPLES), MOST_SAMPLES)
    times = [clock.sample(call, calls) for _ in range(samples)]
    if group is not None:
        times = combined(times, clock.device, clock.across, group)
    return slowest([clock.summary(times)], clock.device)[0]


def repeated(call: Timed, times: int, device: torch.device) -> Timed:
    """A call that does ``call`` many times; on a GPU as one CUDA graph, so that the host's pace does not count."""
    if device.type == "cuda":
        call()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # Not "global": NCCL's watchdog asks for events from a thread of its own meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(times):
                call()
        return graph.replay

    def many() -> None:
        for _ in range(times):
            call()

    return many


def meet(device: torch.device) -> None:
    """Let the ranks of the job start together."""
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """The largest of each value over all ranks."""
    if not dist.is_initialized():
        return list(values)
    return combined(values, device, dist.ReduceOp.MAX, None)


def combined(
    values: Sequence[float],
    device: torch.device,
    operation: dist.ReduceOp.RedOpType,
    group: dist.ProcessGroup | None,
) -> list[float]:
    """Each value, combined over the ranks of a group; None is the whole job."""
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation, group)
    return tensor.tolist()
